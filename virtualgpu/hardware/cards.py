"""The table of cards, each with its source.

Rates are dense TFLOPS (data sheets from Ampere on print twice that, "with sparsity"), and those of tensor cores that accumulate
in float32, as PyTorch has them do (torch.backends.cuda.matmul.allow_fp16_accumulation is off): on a GeForce they are half of
what the same cores do when they accumulate in float16. Clocks (MHz) and caches as CUDA's sample deviceQuery prints them.

Memory is total_memory as PyTorch or deviceQuery printed it on such a card; it moves by some MiB between drivers. "read" below
says by what, in posts and files of public repositories.

Cards stand here as they are sold: without the NVLink bridge that may join two of them (`bridges`). GeForce cards do not reach each
other's memory then (NVIDIA/nccl#1127, nccl-tests#117: 2080 Ti, 3090, 4090; TITAN RTX taken to be like the 2080 Ti, of the same
chip): copies pass through the host (`links`).
"""

import torch

from virtualgpu.hardware import links
from virtualgpu.hardware.datasheet import NVLINK_LATENCY, PCIE3, PCIE4, PCIE5, TF32, Link, NVLink, Spec
from virtualgpu.hardware.units import MIB

_PCIE = {3: PCIE3, 4: PCIE4, 5: PCIE5}


def _rates(fp64: float, fp32: float, tf32: float = 0, half: float = 0, fp16: float = 0, fp8: float = 0) -> dict:
    """FLOP/s from TFLOPS; `half` is that of float16 and bfloat16, which is one from Ampere on."""
    found = {torch.float64: fp64, torch.float32: fp32, TF32: tf32}
    found |= {torch.float16: half or fp16, torch.bfloat16: half, torch.float8_e4m3fn: fp8, torch.float8_e5m2: fp8}
    return {dtype: float(f"{rate}e12") for dtype, rate in found.items() if rate}


def _chip(clock: float, l2: float, bus: int | None, memory: float | None, power: float) -> dict:
    """MHz, MiB, bits, MHz and watts."""
    return {
        "clock": clock * 1e6,
        "l2": int(l2 * MIB),
        "bus": bus,
        "memory_clock": memory and memory * 1e6,
        "power": float(power),
    }


def _pcie(generation: int, staged: tuple[int, int] | None = None) -> dict:
    """staged: the capability of a card without peer access, whose copies pass the host's memory."""
    host = _PCIE[generation]
    return {"peer": links.copies(staged, host) if staged else host, "host": host, "peer_access": staged is None}


def _nvlink(many: int, gigabytes: float, pcie: int, neighbour: int | None = None) -> dict:
    """`many` of so many GB/s each way to an NVSwitch; or, without one, `neighbour` of them to each neighbour."""
    peer = Link((neighbour or many) * gigabytes * 1e9, NVLINK_LATENCY)
    return {"peer": peer, "host": _PCIE[pcie], "nvlink": NVLink(many, gigabytes * 1e9, switch=neighbour is None)}


# Looked up by name: of several that fit, the first. The lessons' four come first, then the others by age.
# fmt: off
SPECS = {
    # NVIDIA T4 data sheet (2019): 8.1 TFLOPS float32, 65 float16, 320 GB/s, PCIe 3.0, 70 W. float64 1/32 of float32 (Turing
    # white paper). Memory read from PyTorch on Colab. A pair, as Kaggle has it, is one of a virtual machine: no peer access (NVIDIA/nccl#428).
    "T4": Spec(
        "Tesla T4", 15095 * MIB, (7, 5), 40, _rates(0.25, 8.1, fp16=65), 320e9,
        **_pcie(3, staged=(7, 5)), **_chip(1590, 4, 256, 5001, 70)),
    # NVIDIA V100 data sheet (2020), SXM2: 7.8 TFLOPS float64, 15.7 float32, 125 with tensor cores, 900 GB/s, 300 W. Two of its
    # six NVLinks of 25 GB/s lead to one neighbour (DGX-1 white paper). Memory read from PyTorch.
    "V100": Spec(
        "Tesla V100-SXM2-16GB", 16160 * MIB, (7, 0), 80, _rates(7.8, 15.7, fp16=125), 900e9,
        **_nvlink(6, 25, pcie=3, neighbour=2), **_chip(1530, 6, 4096, 877, 300)),
    # NVIDIA A100 data sheet (2021), SXM 40 GB: 9.7 TFLOPS float64, 19.5 float32, 156 TF32, 312 float16 and bfloat16, 1,555 GB/s,
    # NVLink 600 GB/s both ways, PCIe 4.0, 400 W. Memory read from PyTorch.
    "A100": Spec(
        "NVIDIA A100-SXM4-40GB", 40326 * MIB, (8, 0), 108, _rates(9.7, 19.5, 156, 312), 1555e9,
        **_nvlink(12, 25, pcie=4), **_chip(1410, 40, 5120, 1215, 400)),
    # NVIDIA H100 data sheet (2023), SXM: 34 TFLOPS float64, 67 float32, 494.5 TF32, 989.5 float16 and bfloat16, 1,979 float8,
    # 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5.0, 700 W. Memory read from deviceQuery (driver of CUDA 13.0).
    "H100": Spec(
        "NVIDIA H100 80GB HBM3", 81079 * MIB, (9, 0), 132, _rates(34, 67, 494.5, 989.5, fp8=1979), 3350e9,
        **_nvlink(18, 25, pcie=5), **_chip(1980, 50, 5120, 2619, 700)),

    # NVIDIA P100 data sheet (2016), PCIe 16 GB: 4.7 TFLOPS float64, 9.3 float32, 732 GB/s, PCIe 3.0, 250 W. Its 18.7 of float16
    # accumulate in float16; in float32, as PyTorch has it, float16 runs no faster than float32. Memory read from PyTorch (Colab).
    "P100": Spec(
        "Tesla P100-PCIE-16GB", 16280 * MIB, (6, 0), 56, _rates(4.7, 9.3, fp16=9.3), 732e9,
        **_pcie(3), **_chip(1328.5, 4, 4096, 715, 250)),
    # The same, SXM2: 5.3 and 10.6 TFLOPS (21.2 of float16, see above), 300 W; four NVLinks of 20 GB/s, one to each neighbour
    # (DGX-1 white paper, 2017). Memory read from OpenXLA's target_config/specs/p100.txtpb.
    "P100-SXM2": Spec(
        "Tesla P100-SXM2-16GB", 16276 * MIB, (6, 0), 56, _rates(5.3, 10.6, fp16=10.6), 732e9,
        **_nvlink(4, 20, pcie=3, neighbour=1), **_chip(1480.5, 4, 4096, 715, 300)),
    # As the V100 above. Memory read from PyTorch on the PCIe card of the same 32 GB; the SXM2's was not found.
    "V100-32GB": Spec(
        "Tesla V100-SXM2-32GB", 32510 * MIB, (7, 0), 80, _rates(7.8, 15.7, fp16=125), 900e9,
        **_nvlink(6, 25, pcie=3, neighbour=2), **_chip(1530, 6, 4096, 877, 300)),
    # NVIDIA TITAN RTX data sheet (2018): 16.3 TFLOPS float32, 130 with tensor cores (accumulating in float32 too: Turing white
    # paper, Quadro RTX 6000, same chip and clock), 672 GB/s, PCIe 3.0, 280 W. float64 1/32. Memory read from PyTorch.
    "TITAN RTX": Spec(
        "NVIDIA TITAN RTX", 24190 * MIB, (7, 5), 72, _rates(0.51, 16.3, fp16=130.5), 672e9,
        **_pcie(3, staged=(7, 5)), **_chip(1770, 6, 384, 7001, 280)),
    # NVIDIA Ampere GA102 white paper (2021), table of the RTX 3090: 35.6 TFLOPS float32 and TF32, 71 float16 and bfloat16 with
    # FP32 accumulate (142 with FP16), 936 GB/s, PCIe 4.0, 350 W. float64 1/64. Memory read from PyTorch.
    "RTX 3090": Spec(
        "NVIDIA GeForce RTX 3090", 24259 * MIB, (8, 6), 82, _rates(0.56, 35.6, 35.6, 71), 936e9,
        **_pcie(4, staged=(8, 6)), **_chip(1695, 6, 384, 9751, 350)),
    # The same white paper, RTX A6000: 38.7 TFLOPS float32, 77.4 TF32, 154.8 float16 and bfloat16 (no halving here), 768 GB/s,
    # PCIe 4.0, 300 W. float64 1/64. Memory read from PyTorch.
    "RTX A6000": Spec(
        "NVIDIA RTX A6000", 48676 * MIB, (8, 6), 84, _rates(0.6, 38.7, 77.4, 154.8), 768e9,
        **_pcie(4), **_chip(1800, 6, 384, 8001, 300)),
    # NVIDIA A10G, a card of AWS alone (G5, 2021): 35 TFLOPS float32 and TF32, 70 float16 and bfloat16, 600 GB/s, PCIe 4.0, 300 W.
    # Its data sheet was not to be had; these are what others quote of it, and what 80 multiprocessors (read from PyTorch; an A10
    # has 72, and lists with 31.5 count those) do at 1,710 MHz with a GeForce's tensor rates. Memory read from PyTorch 2.15.
    "A10G": Spec(
        "NVIDIA A10G", 22587 * MIB, (8, 6), 80, _rates(0.55, 35, 35, 70), 600e9,
        **_pcie(4), **_chip(1710, 6, 384, 6251, 300)),
    # NVIDIA A100 data sheet (2021), SXM 80 GB: as the A100 above, but 2,039 GB/s. Memory read from deviceQuery (CUDA 12.5).
    "A100-80GB": Spec(
        "NVIDIA A100-SXM4-80GB", 81157 * MIB, (8, 0), 108, _rates(9.7, 19.5, 156, 312), 2039e9,
        **_nvlink(12, 25, pcie=4), **_chip(1410, 40, 5120, 1593, 400)),
    # NVIDIA A100 PCIe product brief (2020): rates and memory of the SXM 40 GB, 250 W. Memory read from PyTorch.
    "A100-PCIE-40GB": Spec(
        "NVIDIA A100-PCIE-40GB", 40326 * MIB, (8, 0), 108, _rates(9.7, 19.5, 156, 312), 1555e9,
        **_pcie(4), **_chip(1410, 40, 5120, 1215, 250)),
    # NVIDIA A100 data sheet (2021), PCIe 80 GB: 1,935 GB/s, 300 W. Memory read from deviceQuery (CUDA 12.4).
    "A100-PCIE-80GB": Spec(
        "NVIDIA A100 80GB PCIe", 81037 * MIB, (8, 0), 108, _rates(9.7, 19.5, 156, 312), 1935e9,
        **_pcie(4), **_chip(1410, 40, 5120, 1512, 300)),
    # NVIDIA L4 data sheet (2023): 30.3 TFLOPS float32, 60 TF32, 121 float16 and bfloat16, 242.5 float8, 300 GB/s, PCIe 4.0, 72 W.
    # float64 1/64 (Ada white paper). Memory read from deviceQuery (driver 525).
    "L4": Spec(
        "NVIDIA L4", 22518 * MIB, (8, 9), 58, _rates(0.47, 30.3, 60, 121, fp8=242.5), 300e9,
        **_pcie(4), **_chip(2040, 48, 192, 6251, 72)),
    # NVIDIA Ada white paper (2022), RTX 4090: 82.6 TFLOPS float32 and TF32; with FP32 accumulate 165.2 float16 and bfloat16 and
    # 330.3 float8 (twice that with FP16); 1,008 GB/s, PCIe 4.0, 450 W. float64 1/64. Memory read from deviceQuery (CUDA 13.0).
    "RTX 4090": Spec(
        "NVIDIA GeForce RTX 4090", 24081 * MIB, (8, 9), 128, _rates(1.29, 82.6, 82.6, 165.2, fp8=330.3), 1008e9,
        **_pcie(4, staged=(8, 9)), **_chip(2520, 72, 384, 10501, 450)),
    # NVIDIA H100 data sheet (2023), PCIe: 26 TFLOPS float64, 51 float32, 378 TF32, 756.5 float16 and bfloat16, 1,513 float8,
    # 2 TB/s, PCIe 5.0, 350 W. Memory read from PyTorch.
    "H100-PCIe": Spec(
        "NVIDIA H100 PCIe", 81008 * MIB, (9, 0), 114, _rates(26, 51, 378, 756.5, fp8=1513), 2000e9,
        **_pcie(5), **_chip(1755, 50, 5120, 1593, 350)),
    # What torchtitan measures on (docs/performance.md and its pull request 800, 2025): 96 GB of HBM2e, 95 GiB to PyTorch, 2.4 TB/s,
    # limit set to 500 W. NVIDIA prints no sheet of it; torchtitan puts its peak between the NVL's (835 float16) and the SXM's, so
    # that the SXM's rates, clock and cache stand here as a bound. The name that PyTorch prints is not known.
    "H100-96GB": Spec(
        "NVIDIA H100 96GB HBM2e", 95 * 1024 * MIB, (9, 0), 132, _rates(34, 67, 494.5, 989.5, fp8=1979), 2400e9,
        **_nvlink(18, 25, pcie=5), **_chip(1980, 50, None, None, 500)),
    # NVIDIA H200 data sheet (2024), SXM: rates, NVLink and 700 W of the H100, 4.8 TB/s. Memory and cache read from PyTorch.
    "H200": Spec(
        "NVIDIA H200", 143156 * MIB, (9, 0), 132, _rates(34, 67, 494.5, 989.5, fp8=1979), 4800e9,
        **_nvlink(18, 25, pcie=5), **_chip(1980, 60, 6144, 3201, 700)),
    # NVIDIA RTX Blackwell white paper (2025), RTX 5090: 104.8 TFLOPS float32 and TF32; with FP32 accumulate 209.5 float16 and
    # bfloat16 and 419 float8; 1,792 GB/s, PCIe 5.0, 575 W. float64 1/64. Memory read from deviceQuery (NVIDIA/nccl#1637).
    "RTX 5090": Spec(
        "NVIDIA GeForce RTX 5090", 32120 * MIB, (12, 0), 170, _rates(1.64, 104.8, 104.8, 209.5, fp8=419), 1792e9,
        **_pcie(5, staged=(12, 0)), **_chip(2407, 96, 512, 14001, 575)),
    # NVIDIA Blackwell data sheet (2025), HGX B200: 37 TFLOPS float64, 75 float32, 1,125 TF32, 2,250 float16 and bfloat16, 4,500
    # float8, 7.7 TB/s (the bus has 7,680 bits: pytorch/ao#4002), NVLink 1.8 TB/s both ways, PCIe 5.0, 1,000 W. Memory read from
    # PyTorch.
    "B200": Spec(
        "NVIDIA B200", 182642 * MIB, (10, 0), 148, _rates(37, 75, 1125, 2250, fp8=4500), 7700e9,
        **_nvlink(18, 50, pcie=5), **_chip(1965, 126.5, 7680, 3996, 1000)),
}
# fmt: on
