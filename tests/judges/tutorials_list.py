"""The tutorials that are judged: which blocks of a page, where it is shortened or corrected, what it must print."""

from tests.judges.tutorials_given import BOTH, DATA, END, FSDP2, MLP, MNIST_NEEDS, NCCL, RANK, TP, Tutorial

EIGHT, PLAN = "(8,)", "layer_tp_plan = {...}"
NO_DOWNLOAD = {"range(10)": "range(2)"}
DIST = "intermediate_source/dist_tuto.rst"
ON_GPUS = {"torch.zeros(1)": "torch.zeros(1).to(rank)", "backend='gloo'": "backend='nccl'"}
FSDP1 = "intermediate_source/FSDP1_tutorial.rst"
ASYNC, CHECKPOINT = (
    "recipes_source/distributed_async_checkpoint_recipe.rst",
    "recipes_source/distributed_checkpoint_recipe.rst",
)
JOIN, MESH = "advanced_source/generic_join.rst", "recipes_source/distributed_device_mesh.rst"

TUTORIALS = {
    # one process
    "data_parallel": Tutorial("beginner_source/blitz/data_parallel_tutorial.py", 2, "use 2 GPUs.*output_size"),
    "model_parallel": Tutorial(
        *("intermediate_source/model_parallel_tutorial.py", 2, "all done"),
        after="print('all done')",
        changes={
            "batch_size = 120": "batch_size = 8",
            "image_w = 128\nimage_h = 128": "image_w = image_h = 64",
            "num_repeat = 10": "num_repeat = 1",
            "[1, 3, 5, 8, 10, 12, 20, 40, 60]": "[1, 3, 5]",
        },
        commit="42be0e1e",
    ),
    # DDP
    "ddp": Tutorial(
        *(
            "intermediate_source/ddp_tutorial.rst",
            4,
            "Finished running DDP with model parallel example on rank 1",
            (0, 1, 2, 3, 4),
        ),
        changes={
            "run_demo(demo_model_parallel, world_size)": "run_demo(demo_model_parallel, world_size // 2)"
        },  # two GPUs each
    ),
    "ddp_torchrun": Tutorial("intermediate_source/ddp_tutorial.rst", 2, "Finished running basic DDP", (5,), 2),
    "zero": Tutorial("recipes_source/zero_redundancy_optimizer.rst", 2, "before optimizer step.*params sum", (0,)),
    "join": Tutorial(JOIN, 2, "exhausted all 6 of", (0,)),
    "join_zero": Tutorial(JOIN, 2, "exhausted all 6 of", (0, 2)),
    "join_counter": Tutorial(JOIN, 2, "11 inputs processed across all ranks!.*11 inputs processed across", (4,)),
    # messages and collectives
    "dist_send": Tutorial(DIST, 2, r"tensor\(1\.\).*tensor\(1\.\)", (0, 1)),
    "dist_isend": Tutorial(DIST, 2, r"tensor\(1\.\).*tensor\(1\.\)", (0, 2)),
    "dist_all_reduce": Tutorial(DIST, 2, r"tensor\(2\.\).*tensor\(2\.\)", (0, 3)),
    "dist_send_nccl": Tutorial(DIST, 2, r"tensor\(1\., device='cuda:1'\)", (0, 1), changes=ON_GPUS),
    "dist_isend_nccl": Tutorial(DIST, 2, r"tensor\(1\., device='cuda:1'\)", (0, 2), changes=ON_GPUS),
    "dist_sgd": Tutorial(
        DIST, 2, "Rank +1 , epoch +1", (0, 4, 5, 7, 6), before=DATA + MNIST_NEEDS, changes=NO_DOWNLOAD
    ),
    "dist_sgd_nccl": Tutorial(
        *(DIST, 2, "Rank +1 , epoch +1", (0, 4, 5, 7, 6)),
        before=DATA + MNIST_NEEDS,
        changes={
            **NO_DOWNLOAD,
            "backend='gloo'": "backend='nccl'",
            "Net()": "Net().to(rank)",
            "model(data)": "model(data.to(rank))",
            "nll_loss(output, target)": "nll_loss(output, target.to(rank))",
        },
    ),
    "dist_ring": Tutorial(
        *(DIST, 4, "ring: 6.0.*ring: 6.0.*ring: 6.0.*ring: 6.0", (8,), 4),
        before=NCCL,
        after="total = torch.zeros(4, device=device)\nallreduce(torch.full((4,), float(rank), device=device), total)\n"
        "print('ring:', total[0].item())\ndist.destroy_process_group()",
    ),
    "tcp_store": Tutorial("intermediate_source/TCPStore_libuv_backend.rst", 1, "", (3, 4)),
    # FSDP, FSDP2
    "fsdp1": Tutorial(
        FSDP1,
        2,
        "Test set: Average loss.*FullyShardedDataParallel",
        (0, 1, 2, 3, 4, 5, 6),
        before=DATA,
        arguments=("--epochs", "1", "--save-model"),
    ),
    "fsdp1_wrap_offload": Tutorial(
        *(FSDP1, 2, "Test set: Average loss.*FullyShardedDataParallel", (0, 1, 2, 3, 4, 5, 6)),
        before=DATA,
        changes={
            "model = FSDP(model)": "model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, cpu_offload=CPUOffload(offload_params=True))",
            "min_num_params=100": "min_num_params=20000",
        },
        arguments=("--epochs", "1", "--save-model"),
    ),
    "fsdp2": Tutorial(
        "intermediate_source/FSDP_tutorial.rst",
        2,
        BOTH,
        (0, 1, 2, 3, 5, 7, 6, 9, 4, 11),
        2,
        FSDP2,
        END,
        {
            'torch.save(cpu_state_dict, "checkpoints/model_state_dict.pt")': 'if rank == 0: torch.save(cpu_state_dict, "checkpoints/model_state_dict.pt")\ndist.barrier()'
        },
    ),
    "fsdp2_broadcast": Tutorial(
        "intermediate_source/FSDP_tutorial.rst",
        2,
        BOTH,
        (0, 9, 8),
        2,
        FSDP2,
        END,
        {'torch.save(model_state_dict, "model_state_dict.pt")': "full_sd = model_state_dict"},
    ),
    # meshes, tensor parallel, context parallel, what they communicate
    "mesh_by_hand": Tutorial(MESH, 4, "Running example on rank=3", (0,), 4, after=END),
    "mesh": Tutorial(MESH, 4, BOTH, (2,), 4, RANK, END, {"(2, 4)": "(2, 2)"}),
    "mesh_hsdp": Tutorial(
        MESH,
        4,
        BOTH,
        (4,),
        4,
        RANK,
        "\nmodel(torch.ones(2, 10, device=device)).sum().backward()" + END,
        {"(2, 4)": "(2, 2)", "device_mesh=mesh_2d": "mesh=mesh_2d"},
    ),  # fully_shard never had that name
    "mesh_3d": Tutorial(MESH, 4, BOTH, (6,), 4, RANK, END, {"(2, 2, 2)": "(1, 2, 2)"}),
    "tensor_parallel": Tutorial(
        "intermediate_source/TP_tutorial.rst",
        2,
        BOTH,
        (0, 2, 3, 4, 5),
        2,
        TP,
        "torch.testing.assert_close(model(input_ids), expected)" + END,
        {EIGHT: "(2,)", PLAN: "pass", "(use_local_output=False)": "()"},
    ),
    "sequence_parallel": Tutorial(
        "intermediate_source/TP_tutorial.rst",
        2,
        BOTH,
        (0, 7, 8, 4, 10, 11),
        2,
        TP,
        END,
        {
            EIGHT: "(2,)",
            PLAN: "pass",
            "input_layouts=(Shard(1), Replicate())": "input_layouts=(Shard(1), None)",
            "desired_input_layouts=(Replicate(), Replicate())": "desired_input_layouts=(Replicate(), None)",
            '"attention.wq": ColwiseParallel(use_local_output=False)': '"attention.wq": ColwiseParallel()',
            '"attention.wk": ColwiseParallel(use_local_output=False)': '"attention.wk": ColwiseParallel()',
            '"attention.wv": ColwiseParallel(use_local_output=False)': '"attention.wv": ColwiseParallel()',
        },
    ),
    "comm_debug": Tutorial(
        "recipes_source/distributed_comm_debug_mode.rst",
        2,
        "c10d_functional.all_reduce: 1.*has done all",
        (0,),
        2,
        NCCL + MLP,
        END,
    ),
    "attention": Tutorial("unstable_source/context_parallel.rst", 1, "", (0,), changes={"8192": "256"}, like="A100"),
    "context_parallel": Tutorial("unstable_source/context_parallel.rst", 4, "", (1,), 4, like="A100"),
    "context_parallel_alltoall": Tutorial(
        "unstable_source/context_parallel.rst",
        4,
        "",
        (1,),
        4,
        changes={
            "\ndef context": "\nfrom torch.distributed.tensor.experimental._attention import set_rotate_method\nset_rotate_method('alltoall')\ndef context"
        },
        like="A100",
    ),
    # pipelines
    "pipeline": Tutorial(
        "intermediate_source/pipelining_tutorial.rst",
        2,
        "losses: ",
        (),
        2,
        changes={"(32, 500)": "(32, 50)", "ones(32, 500": "ones(32, 50"},
    ),
    "pipeline_tracer": Tutorial(
        "intermediate_source/pipelining_tutorial.rst",
        2,
        "losses: ",
        (),
        2,
        changes={
            "(32, 500)": "(32, 50)",
            "ones(32, 500": "ones(32, 50",
            "   stage = manual_model_split(model)": "",
            "   # stage = tracer": "   stage = tracer",
        },
    ),
    # checkpoints
    "checkpoint": Tutorial(CHECKPOINT, 2, "", (0,)),
    "async_checkpoint": Tutorial(ASYNC, 2, "", (0,), changes={"range(10)": "range(3)"}),
    "async_checkpoint_pinned": Tutorial(
        ASYNC,
        2,
        "",
        (1,),
        changes={
            "range(10)": "range(3)",
            "        dcp.async_save(": "        checkpoint_future = dcp.async_save(",
        },  # it waits for it
    ),
}
