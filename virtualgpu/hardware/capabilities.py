"""What follows from a card's compute capability alone: NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities".

Cores are the guide's results per clock and multiprocessor of 32-bit floating-point additions. Read back from real cards
(OpenXLA's xla/backends/gpu/target_config/specs, 2026): P100, V100, A100, A6000, H100 and B200 say the same.
"""

from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True)
class Capability:
    """Limits of one multiprocessor; memory in bytes. Warps of 32, 65,536 registers, blocks of 1,024 threads: all of these."""

    architecture: str
    cores: int  # for float32
    threads: int
    shared: int  # shared memory of a multiprocessor
    optin: int  # what one block may have of it, where a kernel asks (cudaFuncAttributeMaxDynamicSharedMemorySize)


CAPABILITIES = {
    (6, 0): Capability("Pascal", 64, 2048, 64 * KIB, 48 * KIB),
    (6, 1): Capability("Pascal", 128, 2048, 96 * KIB, 48 * KIB),
    (7, 0): Capability("Volta", 64, 2048, 96 * KIB, 96 * KIB),
    (7, 5): Capability("Turing", 64, 1024, 64 * KIB, 64 * KIB),
    (8, 0): Capability("Ampere", 64, 2048, 164 * KIB, 163 * KIB),
    (8, 6): Capability("Ampere", 128, 1536, 100 * KIB, 99 * KIB),
    (8, 9): Capability("Ada", 128, 1536, 100 * KIB, 99 * KIB),
    (9, 0): Capability("Hopper", 128, 2048, 228 * KIB, 227 * KIB),
    (10, 0): Capability("Blackwell", 128, 2048, 228 * KIB, 227 * KIB),
    (10, 3): Capability("Blackwell", 128, 2048, 228 * KIB, 227 * KIB),
    (12, 0): Capability("Blackwell", 128, 1536, 100 * KIB, 99 * KIB),
    (12, 1): Capability("Blackwell", 128, 1536, 100 * KIB, 99 * KIB),
}
