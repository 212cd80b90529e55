"""What a system says that has no process, thread or open file more to give, and the cure."""

import re

MORE_FILES = "raise this process's limit, by `ulimit -n 1024` before it starts"
CURES = {
    # unexpected EOF: multiprocessing's, of a forkserver that ended at once
    r"can't start new thread|Resource temporarily unavailable|unexpected EOF": "no process or thread more: raise this user's limit, "
    "`ulimit -u`, start fewer, or free memory of this machine",
    r"Too many open files": MORE_FILES,
}


def cure(words: str) -> str:
    """To add to those words, in brackets; nothing where it is another error."""
    return next((f" ({sentence})" for said, sentence in CURES.items() if re.search(said, words)), "")
