"""A project's own multi-GPU tests without a GPU: `pytest --virtual-gpus 2 [--virtual-gpus-like H100] [--virtual-gpus-memory 16GB]`.

The virtual GPUs are on before conftest.py and the test modules are imported, and in the processes that tests start. Each test
begins with fresh ones: memory statistics, clocks, streams and random generators as after the start.

    @pytest.mark.virtual_gpus(4, like="A100", memory="16GB")   # other GPUs for one test, with or without the option
    def test_sharding(virtual_gpus):                            # the fixture: their devices (2 where nothing else is said)
        ...

`--virtual-gpus-sanitize`, or sanitize=True in the marker: a race of two streams, or of a stream and the host, fails the test.

Without option, marker and fixture the plugin does nothing, and does not import PyTorch.
"""

import contextlib
import os

import pytest

from virtualgpu import environment

MARKER = (
    "virtual_gpus(n=2, like=None, memory=None, sanitize=False): virtual GPUs for this test, other than those of "
    "--virtual-gpus"
)


def pytest_addoption(parser) -> None:
    """The options, as text; `_begin` reads them."""
    group = parser.getgroup("virtual GPUs")
    group.addoption("--virtual-gpus", metavar="N", help="run the tests on N virtual GPUs, fresh ones for each test")
    group.addoption("--virtual-gpus-like", metavar="CARD", help="their model, such as T4 (the default), A100, H100")
    group.addoption(
        "--virtual-gpus-memory", metavar="SIZE", help="memory of each, such as 16GB; the card's own if not given"
    )
    group.addoption(
        "--virtual-gpus-sanitize",
        action="store_true",
        help="a race of two streams, or of a stream and the host, fails the test; also on virtual GPUs that a test makes itself",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config) -> None:
    """Before conftest.py may import torch."""
    _begin(early_config, early_config.known_args_namespace)


def pytest_configure(config) -> None:
    """Declare the marker, and begin where the hook above came too late."""
    config.addinivalue_line("markers", MARKER)
    _begin(config, config.option)  # where the plugin came too late for the hook above (-p, or pytester)


def pytest_unconfigure(config) -> None:
    """Virtual GPUs off, environment variables as before, the folder of the run gone."""
    if (state := config.stash.get(STATE, None)) is not None:
        state.close()


def pytest_report_header(config) -> str | None:
    """The names of the cards; None without --virtual-gpus."""
    state = config.stash.get(STATE, None)
    if state is None or state.settings is None:
        return None
    return "virtual GPUs: " + ", ".join(card.name for card in state.settings.cards)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """Fresh GPUs, before any fixture makes a tensor."""
    marker = item.get_closest_marker("virtual_gpus")
    state = item.config.stash.get(STATE, None)
    if marker is not None:
        try:
            settings = _marked(*marker.args, **marker.kwargs)
        except (TypeError, ValueError) as error:
            pytest.fail(f"@pytest.mark.virtual_gpus: {error}", pytrace=False)
        _turn_on(_state(item.config), settings)
    elif state is not None and state.settings is not None:
        state.turn_on(state.settings)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item) -> None:
    """GPUs that one test alone asked for go with it."""
    state = item.config.stash.get(STATE, None)
    if state is not None and state.settings is None:
        state.turn_off()


@pytest.fixture
def virtual_gpus(request) -> list:
    """The devices of this test's virtual GPUs: those of its marker, of --virtual-gpus, or two."""
    state = _state(request.config)
    if state.on is None:
        _turn_on(state, _marked())
    import torch

    return [torch.device("cuda", index) for index in range(len(environment.visible_gpus(len(state.on.cards))))]


class _State:
    """What this run of pytest has of virtual GPUs. `settings`: of the option; `on`: now."""

    def __init__(self):
        self.settings = self.on = None
        self.sanitize = False  # in all tests
        self._cleanup = contextlib.ExitStack()
        self._folder = None
        self._environ: dict[str, str | None] = {}

    def turn_on(self, settings: environment.Settings) -> None:
        """Fresh virtual GPUs here, and the same in processes started from now on."""
        from virtualgpu.run import launcher

        if self._folder is None:
            self._folder = self._cleanup.enter_context(launcher.folder())
        settings = settings._replace(folder=self._folder, sanitize=settings.sanitize or self.sanitize)
        for name, value in launcher.variables(settings, os.environ).items():
            self._environ.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        restart(settings, again=self.on == settings)
        self.on = settings

    def turn_off(self) -> None:
        if self.on is not None:
            from virtualgpu import session

            session.deactivate()
            session.look_for_races(self.sanitize)
            self.on = None
            environment.restore(self._environ)
            self._environ.clear()

    def close(self) -> None:
        self.turn_off()
        if self.sanitize:
            from virtualgpu import session

            session.look_for_races(False)
        self._cleanup.close()
        self.settings = self._folder = None


STATE: pytest.StashKey[_State] = pytest.StashKey()


def restart(settings: environment.Settings, again: bool) -> None:
    """Virtual GPUs as after the start. `again`: the same ones are on already."""
    from virtualgpu import session

    if again and session._session is not None:  # a test may have turned them off
        session.restart()
        return
    from virtualgpu.run import child

    child.activate(settings)


def _turn_on(state: _State, settings: environment.Settings) -> None:
    """For one test, which fails with one sentence where PyTorch is not one that virtual GPUs work with."""
    try:
        state.turn_on(settings)
    except environment.UnsupportedPyTorch as error:
        pytest.fail(str(error), pytrace=False)


def _state(config) -> _State:
    return config.stash.setdefault(STATE, _State())


def _begin(config, options) -> None:
    number, like, memory = (
        getattr(options, name, None) for name in ("virtual_gpus", "virtual_gpus_like", "virtual_gpus_memory")
    )
    state = _state(config)
    if state.on is not None:
        return
    if getattr(options, "virtual_gpus_sanitize", False) and not state.sanitize:
        with _usable_pytorch():
            from virtualgpu import session

            state.sanitize = True
            session.look_for_races(True)
    if number is None:
        if like or memory:
            raise pytest.UsageError("--virtual-gpus-like and --virtual-gpus-memory need --virtual-gpus N beside them")
        return
    try:
        state.settings = _marked(number, like, memory)
    except ValueError as error:
        raise pytest.UsageError(f"--virtual-gpus: {error}") from None
    with _usable_pytorch():
        state.turn_on(state.settings)


@contextlib.contextmanager
def _usable_pytorch():
    try:
        yield
    except environment.UnsupportedPyTorch as error:
        raise pytest.UsageError(f"--virtual-gpus: {error}") from None


def _marked(
    n: int | str | None = None,
    like: str | None = None,
    memory: int | str | None = None,
    sanitize: bool = False,
) -> environment.Settings:
    from virtualgpu.run import launcher, options

    count = None if n is None else options.number_of_gpus(str(n))
    return environment.Settings(launcher.find_cards(count, like or "T4", memory), sanitize=sanitize)
