"""Several processes on virtual GPUs: process groups of nccl, their collectives and messages, and what DDP, FSDP and DTensor need.

A collective: `calls` says what it is asked, `checks` what NCCL refuses, `transport` carries it by gloo, `arrivals` is how ranks tell
each other their clocks, `communicator` when it begins and ends, `work` what a program waits for, `functional` those of DTensor.
A message: `p2p`, and `message_log`, on which each rank writes those that it has come to. `groups` are the process groups, `nodes` where their
ranks are, `single_rank` (with `rank_config`) one rank of many in one process, `statistics` what all came to. `ddp`, `dtensor` and `dtensor_random`
know those libraries, `patches` replaces what is to be replaced in torch.distributed, `virtualgpu._compat.distributed` has PyTorch's private names.
"""
