"""Several processes on virtual GPUs: process groups of nccl, their collectives and messages, and what DDP, FSDP and DTensor need.

`process_group` is what replaces torch.distributed's: groups, and the operations that the dispatcher calls. A collective: `collectives` has the
table of them, `calls` how one is asked and what NCCL refuses, `transport` how gloo carries its numbers. `communicator` says when one begins
and ends, `work` what a program waits for, and whether ranks mean the same. `shared_clock` is how ranks meet and tell each other their
simulated time. `p2p` are messages, and ranks that wait for each other.
`topology` says where ranks are, `rank_config` which one of many a process plays alone. `parallel` has what DDP, FSDP1, pipelines and sharded
optimizers need, `dtensor` and `dtensor_random` DTensor, `objects` Python's objects. `_compat.distributed` has PyTorch's private names.
"""
