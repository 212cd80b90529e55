"""What becomes of each operation of PyTorch: which GPU it runs on, room for its results, their values, and its time.

`gpu` is one of them, `machine` all, `allocation` the label that says where a storage lives, `thread_context` what each thread is doing.
`dispatch` meets every operation; `operations` is what is known of it, `placement` finds its GPU and places what it returns, `eager`
carries it out with numbers (`draws`: random ones; `halves`: float16; `histograms`: of whole numbers; `layer_norm`: of half precision;
`layouts`: contiguous results; `scaled_products`: of float8) and `dry` on shapes alone
(`values`: shadow values, `refused`: what it does not take, `meta_results`: what PyTorch
says wrong of shapes), `timing` tells the clock. `factories` are operations that make a tensor, `overrides` those that are like no other, with `recurrent`, `cells`,
`sdpa`, `mixed_batch_norm`, `nested` and `flex_attention`; `kernels` has kernels that the CPU and a dry run lack, `extensions` is for other
people's.
"""
