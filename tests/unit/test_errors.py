"""The error tree: exit codes, pickling, and the picture in the module's docstring."""

import inspect
import pickle
import re

import pytest

from rdt_e2e import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.RdtE2EError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_survives_pickling(cls):
    copy = pickle.loads(pickle.dumps(cls("consumer 3 waited 30 s")))  # noqa: S301  # the bytes of the line itself
    assert type(copy) is cls
    assert str(copy) == "consumer 3 waited 30 s"
    assert copy.exit_code == cls.exit_code


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_drawn_with_its_exit_code(cls):
    drawn = dict(re.findall(r"(\w+Error) +(\d)", str(errors.__doc__)))
    assert drawn[cls.__name__] == str(cls.exit_code)
