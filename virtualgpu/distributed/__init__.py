"""Several processes on virtual GPUs: process groups of nccl, their collectives and messages, and what DDP, FSDP and DTensor need.

`process_group` is what replaces torch.distributed's, with its functions of Python; `operations` what the dispatcher calls. `communicator` has the way
of a collective from top to bottom: this rank comes to it, gloo carries its numbers, it begins and ends, the program waits for it. Beside it stand
`calls` (its arguments in one form, what NCCL refuses of them, what ranks tell each other of it), `collectives` (the table of all kinds, and whether
ranks mean the same one), `transport` (how gloo carries each) and `shared_clock` (how ranks meet, and tell each other their simulated time).
`p2p` are messages, `message_log` which of them each rank has come to, and ranks that wait for each other. `topology` says where ranks are, and
which one of many a process plays alone. `parallel` has what DDP, FSDP1, pipelines and sharded optimizers need, `dtensor` DTensor.
`_compat.distributed` has PyTorch's private names.
"""
