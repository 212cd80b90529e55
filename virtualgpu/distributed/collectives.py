"""The collectives that there are: a row of the table has all that the engine knows of one.

A new one is a row here, with its functions beside those that are there: readers, checks and makers in `calls`, carriers in `transport`, and
its time in `timing.nccl`.
"""

from virtualgpu.distributed import transport
from virtualgpu.distributed.calls import (
    Collective,
    a_tensor_each,
    check_contiguous,
    check_parts,
    check_reduction,
    check_rooted,
    functional_copy,
    functional_in_place,
    functional_parts,
    functional_rows,
    in_place,
    lists,
    lists_by_rank,
    nothing,
    one_tensor,
    one_tensor_each,
    rows,
    splits_of_parts,
    splits_of_rows,
)

TABLE = (
    Collective(
        "all_reduce",
        operations=dict.fromkeys(("allreduce_", "allreduce_coalesced_"), in_place),
        functions={
            "all_reduce": functional_copy,
            "all_reduce_": functional_in_place,
            "all_reduce_coalesced": functional_copy,
            "all_reduce_coalesced_": functional_in_place,
        },
        carry=transport.all_reduce,
        cost="all_reduce",
        checks=(check_reduction,),
        alike=transport.all_reduce_alike,
    ),
    Collective(
        "all_gather",
        operations={
            "_allgather_base_": one_tensor,
            "allgather_": lists,
            "allgather_coalesced_": lists_by_rank,
            "allgather_into_tensor_coalesced_": one_tensor_each,
        },
        functions={f"all_gather_into_tensor{form}": functional_parts for form in ("", "_out", "_coalesced")},
        carry=transport.all_gather,
        cost="all_gather",
        checks=(check_parts,),
        splits=splits_of_parts,
        pairwise=True,
        alike=transport.all_gather_alike,
    ),
    Collective(
        "reduce_scatter",
        operations={
            "_reduce_scatter_base_": one_tensor,
            "reduce_scatter_": lists,
            "reduce_scatter_tensor_coalesced_": one_tensor_each,
        },
        functions={f"reduce_scatter_tensor{form}": functional_parts for form in ("", "_out", "_coalesced")},
        carry=transport.reduce_scatter,
        cost="reduce_scatter",
        checks=(check_reduction, check_parts),
        splits=splits_of_parts,
        scatters=True,
        alike=transport.reduce_scatter_alike,
    ),
    Collective(
        "all_to_all",
        operations={"alltoall_base_": rows, "alltoall_": a_tensor_each},
        functions={"all_to_all_single": functional_rows},
        carry=transport.all_to_all,
        cost="all_to_all",
        checks=(check_contiguous,),
        splits=splits_of_rows,
        pairwise=True,
    ),
    Collective(
        "broadcast",
        operations={"broadcast_": in_place},
        functions={"broadcast": functional_copy, "broadcast_": functional_in_place},
        carry=transport.broadcast,
        cost="broadcast",
        root="from",
        alike=transport.broadcast_alike,
    ),
    Collective(
        "reduce",
        operations={"reduce_": in_place},
        carry=transport.reduce,
        cost="reduce",
        checks=(check_reduction,),
        root="to",
        alike=transport.reduce_alike,
    ),
    Collective(
        "gather",
        operations={"gather_": lists, "gather_into_tensor_": one_tensor},
        carry=transport.gather,
        cost="gather",
        checks=(check_rooted,),
        root="to",
        alike=transport.all_gather_alike,
    ),
    Collective(
        "scatter",
        operations={"scatter_": lists},
        carry=transport.scatter,
        cost="scatter",
        checks=(check_rooted,),
        scatters=True,
        root="from",
        alike=transport.scatter_alike,
    ),
    Collective("barrier", operations={"barrier": nothing}, carry=transport.barrier, cost="barrier"),
)

OPERATIONS = {name: (row, read) for row in TABLE for name, read in row.operations.items()}  # of c10d
FUNCTIONS = {name: (row, make) for row in TABLE for name, make in row.functions.items()}  # of _c10d_functional
