"""A case: a model, a layout, and what is done with them."""
from dataclasses import dataclass, field, replace

MODES = ("train", "resume", "load", "eval", "repeat")


@dataclass
class Case:
    """Keys are 'section.key', values text as a configuration has them."""
    name: str
    mode: str
    dp: int
    model: dict  # what each run of the case is told
    layout: dict  # what the run on several ranks is told besides
    alone: dict = field(default_factory=dict)  # what that of one rank is told besides
    published: str = "none"  # the class of transformers' that the model was drawn as

    def get(self, key, default=None):
        return self.layout.get(key, self.model.get(key, default))

    def number(self, key, default=1):
        return int(self.get(key, default))

    @property
    def ranks(self):
        return self.dp * self.number("parallel.tp") * self.number("parallel.pp") * self.number("parallel.cp")

    @property
    def exact(self):
        """Every layout is to give the same bits, not only every repeat of one."""
        return self.mode != "repeat"

    def but(self, **changes):
        return replace(self, **changes)


def ini(keys):
    """The text of a configuration file."""
    sections = {}
    for key, value in keys.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, []).append(f"{name} = {value}\n")
    return "\n".join(f"[{s}]\n" + "".join(lines) for s, lines in sections.items())


def words(keys):
    """The same as words of a command line."""
    return [f"{key}={value}" for key, value in keys.items()]
