"""Where things are: the repository's folders and the user's cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

#: Overrides the cache folder.
CACHE_VARIABLE = "VLLM_SM120_CACHE"


def default_cache() -> Path:
    """The folder that keeps downloads and upstream's git objects between builds."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser().absolute() if override else Path(platformdirs.user_cache_dir("vllm-sm120"))


@dataclass(frozen=True)
class Layout:
    """The paths of one checkout of this repository."""

    root: Path
    cache: Path

    @property
    def pins(self) -> Path:
        return self.root / "upstream.toml"

    @property
    def releases(self) -> Path:
        return self.root / "releases.toml"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    def patches(self, project: str) -> Path:
        return self.root / "patches" / project

    def overlay(self, package: str) -> Path:
        return self.root / "overlay" / package

    def tree(self, project: str) -> Path:
        return self.build / project

    def edit(self, project: str) -> Path:
        return self.build / "edit" / project

    def rebase(self, project: str) -> Path:
        return self.build / "rebase" / project

    def resolutions(self, project: str) -> Path:
        """Conflicts of earlier rebases and how they were resolved."""
        return self.patches(project) / "rerere"

    def remembered(self, project: str) -> Path:
        """The same for all of this user's rebases, kept even where one is aborted."""
        return self.cache / "resolutions" / project
