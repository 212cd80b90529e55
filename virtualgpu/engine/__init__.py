"""What becomes of each operation of PyTorch: which GPU it runs on, room for its results, their values, and its time.

`gpu` is one of them, `machine` all, `allocation` the label that says where a storage lives, `thread_context` what each thread is doing,
`frames` where in the program it is.
`dispatch` meets every operation; `operations` is what is known of it, `placement` finds its GPU and places what it returns, `eager`
carries it out with numbers (`draws`: random ones, `kept_states`: again in a backward pass; `halves`: float16; `half_fft` and `wider`: what the CPU lacks of types; `histograms`: of
whole numbers; `layer_norm`: of half precision; `layouts`: contiguous results; `scaled_products`: of float8; `in_place`: derivatives) and `dry`
on shapes alone (`values`: shadow values, `sized`: shapes by them, `on_meta`: what the program put there, `refused`: what it does not take,
`meta_results`: what PyTorch says wrong of shapes). `unsupported` and `nondeterministic` refuse what CUDA does, `words` in its words, with
`scalar_types`. `workspaces`, `convolution_workspaces`, `reductions` and `temporaries` are memory that kernels take while they run, `copies`
what goes from place to place, `in_flight` what collectives still fill; `timing` tells the clock, `host_waits` for what the host waits. `factories` are operations that make a tensor, `overrides` those that are like no other, with `recurrent`, `cells`,
`sdpa` (`sdpa_backends` says which kernel), `rms_norm`, `mixed_batch_norm`, `nested` and `flex_attention`; `lacking` registers kernels that PyTorch has for CUDA alone (`synced_batch_norm`) or lacks on shapes (`shapes_alone`), `extensions` is for other
people's.
"""
