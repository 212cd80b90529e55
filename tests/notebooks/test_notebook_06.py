"""What nbval cannot see of notebook 06: its links, and what its figures read of a message."""

import re
import urllib.parse

import pytest
import series

from notebooks.figures import lesson_06

PATH = series.NOTEBOOKS / "06_oom_troubleshooting.ipynb"


def test_each_link_within_the_lesson_leads_to_a_section():
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose, re.M)}
    links = re.findall(r"\]\(#(\S+?)\)", prose)
    assert links and {urllib.parse.unquote(link) for link in links} <= headings


@pytest.mark.parametrize("message, said", [
    # PyTorch 2.15, the last sentence left out
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 256.00 MiB of which 8.00 MiB is free. Process 7 has "
     "100.00 MiB memory in use. Process 8 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 20.00 MiB memory in "
     "use. 64.00 MiB allowed; Of the allocated memory 512 bytes is allocated by PyTorch, and 1.00 KiB is reserved by PyTorch but unallocated.",
     {"tried": 20, "capacity": 256, "free": 8, "Process N": 1124, "this process": 20, "tensors": 2**-11, "unused": 2**-10}),
    # without NVML: github.com/carolchenyx/MGFN./issues/35
    ("CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free. Of the allocated "
     "memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.",
     {"tried": 1740.8, "capacity": 6144, "free": 0, "tensors": 3000.32, "unused": 2355.2}),
    # PyTorch 1.2: github.com/pytorch/pytorch/issues/40002
    ("CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 6.00 GiB total capacity; 693.78 MiB already allocated; 3.91 GiB free; "
     "18.22 MiB cached)", {"tried": 50, "capacity": 6144, "free": 4003.84, "tensors": 693.78}),
    (lesson_06.QUOTED["GenerateU#10"], {"tried": 496, "capacity": 15104, "free": 235.06, "Process N": 14868.48, "tensors": 14397.44,
                                        "unused": 330.42}),
    (lesson_06.QUOTED["Stripformer#21"], {"tried": 1689.6, "capacity": 7976.96, "free": 1433.6, "tensors": 3614.72, "reserved": 5406.72}),
    ("CUDA out of memory. Tried to allocate more than 1EB memory.", {}),
])  # fmt: skip
def test_numbers_of_a_message(message, said):
    assert lesson_06.sizes(message) == pytest.approx(said)
