"""Compiles the scheduler's core, the mock GPU and the simulator's loop into the wheel, if asked to.

mypyc makes C of the very same files, which it finds in pyproject.toml; they stay in the wheel beside what was made of
them. Asked with HATCH_BUILD_HOOK_ENABLE_CUSTOM=1, and for a wheel only: in a checkout an edited file would not be the
one that runs.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Compile(BuildHookInterface[Any]):
    """See the module. Its settings: `modules`, patterns of the files to compile."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what comes of it into the wheel."""
        if version == "editable":
            return
        from mypyc.build import mypycify  # a build that does not compile does not have these
        from setuptools import Distribution

        root = Path(self.root)
        files = [path for pattern in self.config["modules"] for path in sorted(root.glob(pattern))]
        made = root / "build" / "mypyc"
        shutil.rmtree(made, ignore_errors=True)
        os.chdir(root)  # mypy names modules from here
        extensions = mypycify(
            [
                f"--cache-dir={made / 'cache'}",
                *(str(path.relative_to(root)) for path in files if path.name != "__init__.py"),
            ],
            opt_level="2",
            debug_level="0",
            group_name="lorrery",
            target_dir=str(made / "c"),
        )
        command = Distribution({"name": "lorrery", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(made / "lib"), str(made / "objects")
        command.ensure_finalized()
        command.run()
        for library in (made / "lib").rglob("*.so"):
            build_data["force_include"][str(library)] = str(library.relative_to(made / "lib"))
        build_data["pure_python"], build_data["infer_tag"] = False, True
