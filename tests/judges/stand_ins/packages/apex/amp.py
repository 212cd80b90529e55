"""`amp.initialize` and `amp.scale_loss` by autocast."""

import contextlib

import torch


def initialize(model, optimizer=None, opt_level="O1", **options):
    forward = model.forward

    def cast(*arguments, **named):
        with torch.autocast("cuda", torch.float16, enabled=opt_level != "O0"):
            return forward(*arguments, **named)

    model.forward = cast
    return model if optimizer is None else (model, optimizer)


@contextlib.contextmanager
def scale_loss(loss, optimizer, **options):
    yield loss
