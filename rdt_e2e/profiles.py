"""Configuration files: finding profiles, merging the sources, and turning what is wrong into one line."""

import difflib
import os
import re
import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from rdt_e2e.config import Config
from rdt_e2e.errors import ConfigError

ENV_PREFIX = "RDT_E2E_"
"""Prefix of this package's own environment variables, ``RDT_E2E_<SECTION>__<FIELD>``."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error; plain YAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Environment(Config, BaseSettings):  # type: ignore[misc]  # two dialects of model_config
    """Tells the settings library which variables exist and how each is parsed."""


def profiles_dir() -> Path:
    """The folder of named profiles: inside an installed package, else beside it in the repository."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "configs"


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    return tuple(sorted(path.stem for path in profiles_dir().glob("*.yaml")))


def find_profile(name_or_file: str) -> Path:
    """Turn a profile name or a file path into the path of an existing file.

    Raises:
        ConfigError: There is no such profile or file.
    """
    if os.sep in name_or_file or name_or_file.endswith((".yaml", ".yml")):
        path = Path(name_or_file).expanduser()
        if not path.is_file():
            raise ConfigError(f"{path}: no such configuration file; check the path")
        return path
    names = profile_names()
    if name_or_file not in names:
        raise ConfigError(
            f"no profile named {name_or_file!r}; profiles: {', '.join(names)}"
            f"{_did_you_mean(name_or_file, names)}; or give the path of a .yaml file"
        )
    return profiles_dir() / f"{name_or_file}.yaml"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        # The loader is a SafeLoader; the rule sees only that it is not that very class.
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # noqa: S506
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_shown(path)}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{_shown(path)}: not valid YAML{where}: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{_shown(path)}: holds {type(content).__name__}, not a mapping of sections; sections: "
            f"{', '.join(Config.model_fields)}"
        )
    return content


def resolve(name_or_file: str, overrides: Mapping[str, object]) -> Config:
    """Merge profile, environment and overrides, and check the result; see `config.load_config`.

    Raises:
        ConfigError: One line naming the source, the key and what is allowed.
    """
    path = find_profile(name_or_file)
    variables = _environment_keys()
    merged = read_yaml(path)
    _merge(merged, _environment_values(variables))
    for key, value in overrides.items():
        _merge(merged, _nest(key, value))
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        first, *others = error.errors()
        more = f" ({len(others)} more after this one)" if others else ""
        origin = _origin(first, path, variables, overrides)
        raise ConfigError(f"{origin}: {_describe(first)}{more}") from error


def _environment_keys() -> dict[str, str]:
    """Dotted key to variable name, for every variable with our prefix; an unknown one is an error."""
    known = {
        f"{ENV_PREFIX}{section}__{field}".upper(): f"{section}.{field}"
        for section in Config.model_fields
        for field in _keys_of((section,))
    }
    found = {}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX):
            if name not in known:
                raise ConfigError(
                    f"environment: unknown variable {name}{_did_you_mean(name, known)}; the form "
                    f"is {ENV_PREFIX}<SECTION>__<FIELD>, with the keys of `rdt-e2e config --keys`"
                )
            found[known[name]] = name
    return found


def _environment_values(variables: Mapping[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(
        _Environment,
        case_sensitive=False,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
    )
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(
            f"environment: a list in {' or '.join(variables.values())} is not JSON; write it as "
            '["first", "second"]'
        ) from error


def _nest(dotted: str, value: object) -> dict[str, Any]:
    """``("sync.iters", 3)`` as ``{"sync": {"iters": 3}}``."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]  # split never gives an empty list


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put `over` into `base`, mapping by mapping."""
    for key, value in over.items():
        current = base.get(key)
        if isinstance(current, dict) and isinstance(value, Mapping):
            _merge(current, value)
        else:
            base[key] = value


def _keys_of(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys allowed in the section at `location`; none if it is not a section."""
    model: type[BaseModel] = Config
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type):
            return ()
        if not issubclass(field.annotation, BaseModel):
            return ()
        model = field.annotation
    return tuple(model.model_fields)


def _origin(
    error: ErrorDetails, path: Path, variables: Mapping[str, str], overrides: Mapping[str, object]
) -> str:
    """Say where the value came from; a rule about a whole section names all that took part."""
    key = ".".join(map(str, error["loc"]))
    for flag in overrides:
        if f"{key}.".startswith(f"{flag}."):
            return "command line"
    for field, name in variables.items():
        if f"{key}.".startswith(f"{field}."):
            return f"environment variable {name}"
    inside = f"{key}." if key else ""
    above = [f"{flag} from the command line" for flag in overrides if flag.startswith(inside)]
    above += [name for field, name in variables.items() if field.startswith(inside)]
    return f"{_shown(path)}{' with ' if above else ''}{', '.join(above)}"


def _describe(error: ErrorDetails) -> str:
    """One validation error in words: the key, what was found, what is allowed."""
    location = error["loc"]
    key = ".".join(map(str, location))
    kind, found = error["type"], reprlib.repr(error["input"])
    if kind == "extra_forbidden":
        allowed = _keys_of(location[:-1])
        section = ".".join(map(str, location[:-1]))
        return (
            f"unknown key {key}{_did_you_mean(str(location[-1]), allowed)}; allowed"
            f"{f' in {section}' if section else ''}: {', '.join(allowed)}"
        )
    if kind == "missing":
        return f"{key} is missing and has no default; see `rdt-e2e config --keys`"
    if kind == "model_type":
        return f"{key} is {found}; it must be a section with keys {', '.join(_keys_of(location))}"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        # Rules on one field start with "is"; rules on a section name the keys themselves.
        return f"{key} {message}" if message.startswith("is ") else message
    allowed_text = re.sub(r"^[A-Z][a-z]+ should", "it must", error["msg"])
    return f"{key} is {found}; {allowed_text}"


def _did_you_mean(word: str, known: Mapping[str, str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _shown(path: Path) -> str:
    """The path as the user would type it: relative when it lies under the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
