"""Several processes on virtual GPUs: process groups of nccl, their collectives and messages, and what DDP, FSDP and DTensor need.

A collective: `collectives` has the table of them, with functions of `calls` (what one is asked), `functional` (those of DTensor), `checks`
(what NCCL refuses) and `transport` (gloo carries the numbers, in a dry run those that `counts` knows). `operations` is what the dispatcher calls;
`communicator` says when one begins and ends, `arrivals` is how ranks tell each other their clocks, `agreement` whether they mean the same,
`work` what a program waits for.
A message: `p2p`, `message_log`, in which each rank writes those that it has come to, and `hangs`, for those that wait for each other.
`groups` are the process groups, `meeting` how
ranks find each other, `nodes` where they are, `rank_config` one rank of many in one process, `statistics` what all came to.
`ddp`, `optimizer_states`, `dtensor`, `dtensor_random`, `fsdp1`, `pipelines` and `objects` know what their names say; `patches` replaces what is to be replaced
in torch.distributed, `_compat` has PyTorch's private names.
"""
