"""What nbval cannot see of notebook 06: its links, and names of its sections."""

import re
import urllib.parse

import series

PATH = series.NOTEBOOKS / "06_oom_troubleshooting.ipynb"


def test_each_link_of_the_doctor_leads_to_a_section():
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose, re.M)}
    links = re.findall(r"\]\(#(\S+?)\)", prose)
    assert links and {urllib.parse.unquote(link) for link in links} <= headings


def test_a_section_that_a_sentence_names_is_there():
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    sections = {int(number) for number in re.findall(r"^## (\d+) · ", prose, re.M)}
    assert sections == set(range(1, 15))
    assert {int(number) for number in re.findall(r"section (\d+)", prose)} <= sections
