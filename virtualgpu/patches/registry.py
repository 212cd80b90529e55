"""Replace attributes of other modules, and put each one back."""

from typing import Any

MISSING = object()


class Patches:
    """What was replaced, in order. An attribute that the owner only inherited is removed again, not copied into it."""

    def __init__(self):
        self.replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.replaced.append((owner, name, vars(owner).get(name, MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self.replaced:
            owner, name, original = self.replaced.pop()
            if original is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
