"""Cards, and what joins the nodes of a cluster: figures with their sources in `data/`, and figures of one's own. No PyTorch here.

`specs` is the table of cards, with what others measured of them, finds one by the name that people write, and joins pairs by NVLink. `datasheet`
says what a card has, what follows from its compute capability, and what links reach. `network` joins nodes, `settings` is a machine's host, clock
and nodes. `files` reads a card from TOML or JSON, `units` sizes, rates and the tables in `data/`.
"""
