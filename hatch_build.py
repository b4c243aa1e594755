"""Build hook: what lies outside the package but belongs into a wheel.

The three start-up files go to the top of site-packages in every kind of wheel. The tasks go into the package in a
standard wheel only, and so do the published figures and the choices of measured cards: an editable install reads them
from the checkout, where a copy would go stale.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STARTUP_FILES = ("_refusion_eval_autoload.py", "refusion_eval_autoload.pth", "refusion_eval_autoload.start")


class RefusionBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        startup = {str(root / name): name for name in STARTUP_FILES}
        if version == "editable":
            build_data["force_include_editable"].update(startup)
        else:
            build_data["force_include"].update(startup)
            build_data["force_include"][str(root / "tasks")] = "refusion_eval/tasks"
            build_data["force_include"][str(root / "results" / "published")] = "refusion_eval/published"
            for path in (root / "results" / "gpu").glob("*/choices.json"):  # switches that a measured card decided
                build_data["force_include"][str(path)] = f"refusion_eval/gpu/{path.parent.name}/{path.name}"
