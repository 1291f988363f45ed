"""Says what pyproject.toml cannot: every package of the tree, and `configs/` as package data.

The profiles live at the top of the repository, where users look for them; in a wheel they become
`rdt_e2e/configs`, where the installed program looks for them.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rdt_e2e", "rdt_e2e.*"]), "rdt_e2e.configs"],
    package_dir={"rdt_e2e.configs": "configs"},
    package_data={
        "rdt_e2e": ["py.typed"],
        "rdt_e2e.configs": ["*.yaml"],
        "rdt_e2e.profiling": ["templates/*.j2"],
    },
)
