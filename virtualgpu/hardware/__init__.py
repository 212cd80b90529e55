"""Cards, and what joins the nodes of a cluster: figures with their sources, and figures of one's own.

`specs` finds a card by the name that people write; `cards` is the table, `bridges` adds pairs that NVLink joins,
`datasheet` says what a card has, `capabilities` what follows from its compute capability. `files` reads a card from
TOML or JSON, `units` reads sizes and rates. `networks` is the table of networks.
"""
