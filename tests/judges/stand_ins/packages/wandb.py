"""wandb's names, which keep nothing."""

import types


def init(*arguments, **options):
    return types.SimpleNamespace(id="labs", log=log, finish=finish, config={}, summary={})


def log(*arguments, **options):
    pass


def finish(*arguments, **options):
    pass
