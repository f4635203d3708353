"""What pyproject.toml cannot say: configs and experiments, at the top of the repository, are part of the package."""

from setuptools import find_packages, setup

SHIPPED = {f"vitlab.{folder}": folder for folder in ("configs", "experiments")}

setup(
    packages=[*find_packages(include=["vitlab*"]), *SHIPPED],
    package_dir=SHIPPED,
    include_package_data=False,
    package_data={
        "vitlab": ["py.typed", "config/flags.json", "look/*.html", "look/*.js", "look/uplot/*", "weights/*"],
        **{package: ["**/*.yaml", "posbench/**/evidence/**/*"] for package in SHIPPED},
    },
)
