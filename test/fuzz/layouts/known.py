"""Findings whose mend is on its way: cases that meet one are not drawn."""


def known(case):
    """A rank without parameters has states on the host."""
    return case.get("optim.states") == "host" and "" in case.get("parallel.layout", "").split("|")
