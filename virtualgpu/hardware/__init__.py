"""Cards, and what joins the nodes of a cluster: figures with their sources in `data/`, and figures of one's own. No PyTorch here.

`specs` finds a card by the name that people write. `cards` is the table, `bridges` adds pairs that NVLink joins, `datasheet` says what a
card has, `capabilities` what follows from its compute capability, `achieved` and `links` what others measured, `fabric` what joins the GPUs of a group. `files` reads a card
from TOML or JSON, `tables` the files in `data/`, `units` sizes and rates. `networks` and `hosts` are tables as well.
"""
