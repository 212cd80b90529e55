"""Cards, and what joins the nodes of a cluster: figures with their sources in `data/`, and figures of one's own. No PyTorch here.

`specs` is the table of cards, with what others measured of them, finds one by the name that people write or in a file, and joins pairs by NVLink.
`datasheet` says what a card has, what follows from its compute capability, and what links reach. `machine` is what a machine is beside them: network,
host and clock. `units` reads sizes, rates and the tables in `data/`.
"""
