"""Apex's DDP, which takes a model that lies on its GPU, and its SyncBatchNorm."""

import torch
from torch.nn import SyncBatchNorm

convert_syncbn_model = SyncBatchNorm.convert_sync_batchnorm


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, delay_allreduce=False, **options):
        super().__init__(module)
