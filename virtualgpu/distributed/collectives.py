"""The collectives that there are: a row of the table has all that the engine knows of one.

A new one is a row here, with its functions beside those that are there: readers in `calls`, carriers in `transport`, checks in
`checks`, makers in `functional`, and its time in `timing.nccl`.
"""

from virtualgpu.distributed import calls, checks, functional, transport
from virtualgpu.distributed.calls import Collective

TABLE = (
    Collective(
        "all_reduce",
        operations=dict.fromkeys(("allreduce_", "allreduce_coalesced_"), calls.in_place),
        functions={
            "all_reduce": functional.copy,
            "all_reduce_": functional.in_place,
            "all_reduce_coalesced": functional.copy,
            "all_reduce_coalesced_": functional.in_place,
        },
        carry=transport.all_reduce,
        cost="all_reduce",
        checks=(checks.reduction,),
        alike=transport.all_reduce_alike,
    ),
    Collective(
        "all_gather",
        operations={
            "_allgather_base_": calls.one_tensor,
            "allgather_": calls.lists,
            "allgather_coalesced_": calls.lists_by_rank,
            "allgather_into_tensor_coalesced_": calls.one_tensor_each,
        },
        functions={f"all_gather_into_tensor{form}": functional.parts for form in ("", "_out", "_coalesced")},
        carry=transport.all_gather,
        cost="all_gather",
        checks=(checks.parts,),
        splits=calls.splits_of_parts,
        pairwise=True,
        alike=transport.all_gather_alike,
    ),
    Collective(
        "reduce_scatter",
        operations={
            "_reduce_scatter_base_": calls.one_tensor,
            "reduce_scatter_": calls.lists,
            "reduce_scatter_tensor_coalesced_": calls.one_tensor_each,
        },
        functions={f"reduce_scatter_tensor{form}": functional.parts for form in ("", "_out", "_coalesced")},
        carry=transport.reduce_scatter,
        cost="reduce_scatter",
        checks=(checks.reduction, checks.parts),
        splits=calls.splits_of_parts,
        scatters=True,
        alike=transport.reduce_scatter_alike,
    ),
    Collective(
        "all_to_all",
        operations={"alltoall_base_": calls.rows, "alltoall_": calls.a_tensor_each},
        functions={"all_to_all_single": functional.rows},
        carry=transport.all_to_all,
        cost="all_to_all",
        checks=(checks.contiguous,),
        splits=calls.splits_of_rows,
        pairwise=True,
    ),
    Collective(
        "broadcast",
        operations={"broadcast_": calls.in_place},
        functions={"broadcast": functional.copy, "broadcast_": functional.in_place},
        carry=transport.broadcast,
        cost="broadcast",
        root="from",
        alike=transport.broadcast_alike,
    ),
    Collective(
        "reduce",
        operations={"reduce_": calls.in_place},
        carry=transport.reduce,
        cost="reduce",
        checks=(checks.reduction,),
        root="to",
        alike=transport.reduce_alike,
    ),
    Collective(
        "gather",
        operations={"gather_": calls.lists, "gather_into_tensor_": calls.one_tensor},
        carry=transport.gather,
        cost="gather",
        checks=(checks.rooted,),
        root="to",
        alike=transport.all_gather_alike,
    ),
    Collective(
        "scatter",
        operations={"scatter_": calls.lists},
        carry=transport.scatter,
        cost="scatter",
        checks=(checks.rooted,),
        scatters=True,
        root="from",
        alike=transport.scatter_alike,
    ),
    Collective("barrier", operations={"barrier": calls.nothing}, carry=transport.barrier, cost="barrier"),
)

OPERATIONS = {name: (row, read) for row in TABLE for name, read in row.operations.items()}  # of c10d
FUNCTIONS = {name: (row, make) for row in TABLE for name, make in row.functions.items()}  # of _c10d_functional
