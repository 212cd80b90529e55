"""Cards by name, by file, several at once, and what is said where one cannot be had."""

import json
from pathlib import Path

import pytest

from virtualgpu.hardware import machine, specs, units
from virtualgpu.hardware.datasheet import PCIE4
from virtualgpu.hardware.specs import SPECS, TF32, Link, NVLink, find_spec, find_specs, parse_size


@pytest.mark.parametrize("key", SPECS)
def test_each_card_is_found_by_its_names(key):
    spec = SPECS[key]
    for name in (key, key.lower(), key.replace(" ", "").replace("-", "_"), spec.name, spec.name.upper(), spec):
        assert find_spec(name) is spec


WRITTEN = """
A100: a100-40gb, A100-SXM4-40GB, NVIDIA A100, A100 SXM 40 GB
A100-80GB: a100_80g, A100 80GB, A100-80GB-SXM
A100-PCIE-40GB: A100 PCIe, A100 PCI Express
H100: H100-SXM5-80GB, H100-80GB
H100-96GB: h100 96gb
RTX 4090: rtx 4090, RTX4090, 4090
RTX A6000: A6000, rtx-a6000
P100-SXM2: P100 SXM2
B200: B200 192GB, B200 SXM
"""
OTHERS = """
RTX 3090: RTX 3090 Ti
B200: GB200
H100: H100-NVL
A100-80GB: A100-60GB
A10G: A10
"""


def names(text: str) -> list[tuple[str, str]]:
    """(as written, key)."""
    lines = [line.split(": ") for line in text.strip().splitlines()]
    return [(name, key) for key, written in lines for name in written.split(", ")]


@pytest.mark.parametrize(("written", "key"), names(WRITTEN))
def test_names_as_people_write_them(written, key):
    assert find_spec(written) is SPECS[key]


@pytest.mark.parametrize(("name", "nearest"), names(OTHERS))
def test_another_card_is_not_taken_for_it(name, nearest):
    words = rf"no GPU called '{name}' here \(did you mean {nearest}\?\); choose one of T4, "
    with pytest.raises(ValueError, match=words):
        find_spec(name)


@pytest.mark.parametrize("name", ["", "RTX", "NVIDIA", 5, None])
def test_what_is_no_name(name):
    with pytest.raises(ValueError, match=r"there is no GPU called .* here; choose one of T4, .*B200; or describe one"):
        find_spec(name)


def test_memory_may_be_another():
    assert find_spec("RTX 4090", "8 GB").memory == 8 << 30
    assert find_spec(SPECS["T4"], 1 << 30).memory == 1 << 30 and SPECS["T4"].memory == 15095 << 20


@pytest.mark.parametrize(
    "size, message",
    [
        ("9999 TB", "memory='9999 TB' is more than any GPU has; at most 1 PiB"),
        ("1 MB", "is 1,048,576 bytes, and a GPU needs at least 2 MiB"),
        (-5, "is -5 bytes, and a GPU needs at least 2 MiB"),
        (float("nan"), "is not a size"),
        ("much", 'is not a size: give bytes, or text like "256 MB" or "16 GB"'),
        (True, "is not a size"),
    ],
)
def test_sizes_that_cannot_be(size, message):
    with pytest.raises(ValueError, match=message):
        parse_size(size)


def test_sizes_as_people_write_them():
    assert [parse_size(size) for size in ("16GB", "1.5 GiB", "512 m", 2 << 20, "1 TB", 4e8)] == [
        *(16 << 30, 3 << 29, 512 << 20, 2 << 20, 1 << 40, 400_000_000)
    ]


def test_several_cards_in_one_machine():
    t4, v100, own = SPECS["T4"], SPECS["V100"], find_spec("A100", "1 GB")
    assert find_specs(None, "T4,V100") == find_specs(2, " t4 , v100 ") == find_specs(2, ["T4", v100]) == [t4, v100]
    assert find_specs(3, "T4") == find_specs(3, [t4]) == [t4] * 3
    assert find_specs(None, own) == [own] and find_specs(2, (own, "T4")) == [own, t4]
    assert [spec.memory for spec in find_specs(2, "T4,V100", "1 GB")] == [1 << 30] * 2


@pytest.mark.parametrize(
    "n, like, message",
    [
        (3, "T4,V100", r"like names 2 cards \(T4, V100\) for 3 GPUs: name one for all, or one for each"),
        (1, ["T4", SPECS["V100"]], r"like names 2 cards \(T4, Tesla V100-SXM2-16GB\) for 1 GPU:"),
        (2, "T4,", "has a comma too many"),
        (2, [], r"like=\[\] names no card"),
        (0, "T4", "0 GPUs: ask for a whole number of them"),
        (True, "T4", "ask for a whole number"),
        (2, "T4,X9", "no GPU called 'X9'"),
        (2, None, "no GPU called None"),
    ],
)
def test_several_cards_that_cannot_be(n, like, message):
    with pytest.raises(ValueError, match=message):
        find_specs(n, like)


WHOLE = """
name = "NVIDIA GeForce RTX 4080"
memory = "15.6 GB"
capability = "8.9"
processors = 76
bandwidth = "717 GB/s"
host = "PCIe 4.0"
rates = {float32 = "48.7 TFLOPS", tf32 = 48.7e12, float16 = "97.5 TFLOP/s", float8 = "195 tflops"}
kernel = "3 us"
clock = "2505 MHz"
l2 = "64 MB"
power = "320 W"
"""


def written(folder: Path, text: str, name: str = "mycard.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_card_from_a_file(tmp_path):
    spec = find_spec(written(tmp_path, "\ufeff" + WHOLE))  # the mark that Windows' editors begin a file with
    assert (spec.name, spec.memory, spec.capability) == ("NVIDIA GeForce RTX 4080", int(15.6 * 2**30), (8, 9))
    assert (spec.processors, spec.bandwidth, spec.kernel) == (76, 717e9, pytest.approx(3e-6))
    assert spec.rates == {
        **{"float32": 48.7e12, TF32: 48.7e12, "float16": 97.5e12},
        **{"float8_e4m3fn": 195e12, "float8_e5m2": 195e12},
    }
    assert spec.host == spec.peer == PCIE4 and not spec.peer_access
    assert (spec.clock_rate, spec.L2_cache_size, spec.power) == (2_505_000, 64 << 20, 320)
    assert find_spec(tmp_path / "mycard.toml", "1 GB").memory == 1 << 30
    assert [card.name for card in find_specs(2, f"T4,{tmp_path / 'mycard.toml'}")] == ["Tesla T4", spec.name]


def test_a_card_from_json(tmp_path):
    figures = {"name": "Mine", "memory": 2**33, "capability": [9, 0], "processors": 4, "bandwidth": 1e12}
    links = {"host": "PCIe 3.0 x8", "peer": {"bandwidth": "200 GB/s", "latency": "4 us"}, "rates": {"float32": 1e12}}
    nvlink = {"links": 8, "bandwidth": "25 GB/s", "switch": True}
    spec = find_spec(written(tmp_path, json.dumps({**figures, **links, "nvlink": nvlink}), "mine.JSON"))
    assert (spec.memory, spec.capability, spec.bandwidth) == (2**33, (9, 0), 1e12)
    assert spec.host == Link(7.875e9, 10e-6) and spec.peer == Link(200e9, pytest.approx(4e-6)) and spec.peer_access
    assert spec.nvlink == NVLink(8, 25e9, True)


def test_a_base_gives_the_rest(tmp_path):
    spec, a100 = find_spec(written(tmp_path, 'base = "a100"\nmemory = "20 GB"\npeer = "100 GB/s"')), SPECS["A100"]
    assert spec.memory == 20 << 30 and spec.peer == Link(100e9, a100.peer.latency)
    assert {**vars(spec), "memory": a100.memory, "peer": a100.peer} == vars(a100)
    spec = find_spec(written(tmp_path, 'base = "A100"\nbandwidth = 2e12\nrates = {float32 = "39 TFLOPS"}'))
    assert spec.rates == {**a100.rates, "float32": 39e12} and spec.bandwidth == 2e12
    assert spec.memory_clock_rate == 0 and spec.clock_rate == pytest.approx(
        2_820_000, rel=0.001
    )  # no longer the base's


def test_the_documented_example_is_a_card(tmp_path):

    lines = [line for line in specs.__doc__.splitlines() if line.startswith("    ")]
    assert find_spec(written(tmp_path, "\n".join(lines))).name == "NVIDIA GeForce RTX 4080"


@pytest.mark.parametrize(
    "text, message",
    [
        (WHOLE.replace("processors", "procesors"), "'procesors' is no key here; did you mean processors?"),
        (WHOLE.replace("memory", "#"), "memory must be there too, or base ="),
        (WHOLE.replace("float32", "float64"), "rates must say float32"),
        (WHOLE.replace("tf32", "tf23"), "'tf23' is no dtype of rates here; did you mean tf32?"),
        (WHOLE.replace('"717 GB/s"', '"fast"'), "bandwidth = 'fast' is no figure in B/s.*1008 GB/s"),
        (
            WHOLE.replace('"717 GB/s"', "717"),
            r"bandwidth = 717 is 717 B/s, and 100000 to 1e\+15 go here: .* \"1008 GB/s\"",
        ),
        (WHOLE.replace('"3 us"', "99999999999999999999999"), "kernel = 9+ is 1e.23 s, and 1e-09 to 1 go"),
        (WHOLE.replace('"48.7 TFLOPS"', "true"), "float32 = True is no figure in FLOP/s"),
        (WHOLE.replace('"PCIe 4.0"', '"PCIe 9.0"'), "host = 'PCIe 9.0' is no figure.*PCIe 3.0"),
        (WHOLE.replace('"8.9"', '"Ada"'), "capability = 'Ada' must be two numbers"),
        (WHOLE.replace('"8.9"', '"3.5"'), r"compute capability \(3, 5\) is not known"),
        (WHOLE.replace("= 76", '= "76"'), "processors = '76' must be a whole number above 0"),
        (WHOLE.replace("= 76", "= 1000000000"), "processors = 1000000000 must be .* at most 100,000"),
        (WHOLE.replace('"15.6 GB"', '"15.6 XB"'), "memory='15.6 XB' is not a size"),
        (WHOLE + 'peer_access = "no"', "peer_access = 'no' must be true or false"),
        (WHOLE + "nvlink = {links = 12}", "nvlink = .* says all three"),
        (WHOLE + "peer = {latency = 1}", "peer must say its bandwidth"),
        ('name = " "\nbase = "T4"', "name = ' ' must be text"),
        ('base = "A1000"', r"no GPU called 'A1000' here \(did you mean A100\?\)"),
        ('base = "mycard.toml"', "base = 'mycard.toml' must be the name of a card in the table"),
        ("name = ", "it is no TOML"),
    ],
)
def test_files_that_say_no_card(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"mycard\.toml: .*{message}"):
        find_spec(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml: there is no such file"):
        find_spec("nowhere.toml")
    with pytest.raises(ValueError, match=r"\[1\]\.json: it must hold keys"):
        find_spec(written(tmp_path, "[1]", "[1].json"))
    with pytest.raises(ValueError, match="it cannot be read"):
        (tmp_path / "folder.toml").mkdir()
        find_spec(tmp_path / "folder.toml")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[Mine]\nrat = 1", r"\[Mine\] 'rat' is no key here; did you mean rate\? There are rate, shared"),
        ("[Mine]\nshared = true", r'\[Mine\] must say its rate, such as rate = "100 Gb/s"'),
    ],
)
def test_a_table_of_ours_that_says_something_else(tmp_path, monkeypatch, text, message):
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setattr(units, "DATA", tmp_path)
    units.rows.cache_clear()
    with pytest.raises(ValueError, match=rf"mine\.toml: {message}"):
        units.read("mine", machine._network)
    units.rows.cache_clear()


def test_a_card_whose_copies_are_those_that_were_measured(tmp_path):
    spec = find_spec(written(tmp_path, WHOLE + 'peer = "staged"\nbridge = {links = 4, bandwidth = "14 GB/s"}'))
    assert spec.peer == SPECS["RTX 4090"].peer and not spec.peer_access
    assert specs.bridged(spec).peer == Link(56e9, 2e-6) and specs.bridged(spec).peer_access
    based = find_spec(written(tmp_path, 'base = "L4"\npeer = "staged"'))
    assert based.peer == SPECS["RTX 4090"].peer and not based.peer_access
