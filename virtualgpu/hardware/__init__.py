"""Cards, and what joins the nodes of a cluster: figures with their sources in `data/`, and figures of one's own. No PyTorch here.

`specs` finds a card by the name that people write, and joins pairs by NVLink. `cards` is the table, and what others measured of them;
`datasheet` says what a card has, what follows from its compute capability, and what links reach. `network` joins nodes, `settings` is a
machine's host, clock and nodes. `files` reads a card from TOML or JSON, `units` sizes, rates and the tables in `data/`.
"""
