"""Where the files that ship with shardplan lie: inside the package in a wheel, at the top of a checkout otherwise."""

from __future__ import annotations

from pathlib import Path

PLAN_SCHEMA = "plan.schema.json"
REPORT_SCHEMA = "report.schema.json"

_PACKAGE = Path(__file__).resolve().parent


def resource_folder(name: str, package: Path = _PACKAGE) -> Path:
    """The folder ``plans`` or ``schemas``.

    Raises:
        FileNotFoundError: the installation is broken.
    """
    for folder in (package / name, package.parent.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"shardplan is installed without its folder '{name}': install it again")


def plans_folder() -> Path:
    """The folder of the shipped plans."""
    return resource_folder("plans")


def shipped_plans() -> dict[str, Path]:
    """The shipped plans by name, sorted."""
    return {path.stem: path for path in sorted(plans_folder().glob("*.yaml"))}


def plan_schema_path() -> Path:
    """The shipped JSON Schema of the plan file."""
    return resource_folder("schemas") / PLAN_SCHEMA


def report_schema_path() -> Path:
    """The shipped JSON Schema of the report that ``--format json`` prints."""
    return resource_folder("schemas") / REPORT_SCHEMA
