"""The package indexes that the user's pip is configured with.

The tool has no index of its own: whoever installs through a mirror, a proxy or a folder of files gets the
upstream releases from there as well.
"""

from __future__ import annotations

import ast
import logging
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
from unearth import PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.collector import LinkCollectError, logger
from unearth.fetchers import Fetcher, PyPIClient

from scripts.errors import SourceError

# `pip config list` prints one line a key: the section, a dot, the option. What stands first wins.
_SECTIONS = (":env:", "download", "install", "global")


class _Client(PyPIClient):
    def request(self, *arguments: Any, **options: Any) -> httpx2.Response:
        """A page of an index. One that cannot be reached is passed over, as one that answers with an error is."""
        try:
            return super().request(*arguments, **options)
        except httpx2.HTTPError as error:
            raise LinkCollectError(str(error) or type(error).__name__) from None


class Refusals(logging.Handler):
    """Why indexes were passed over, which the library only logs; that one lacks a project is no refusal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Client Error(404)" not in record.getMessage():
            self.messages.append(record.getMessage())

    def __enter__(self) -> Refusals:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)


@dataclass(frozen=True)
class PipConfig:
    """The options of pip that decide where packages come from."""

    options: dict[str, str]

    @classmethod
    def load(cls) -> PipConfig:
        """Ask pip: it merges its configuration files and PIP_* variables itself.

        Raises:
            SourceError: pip cannot read its own configuration.
        """
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            detail = result.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            raise SourceError(f"pip config list failed: {detail[0]}", cure="mend pip's configuration")
        found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
        for line in result.stdout.splitlines():
            key, _, value = line.partition("=")
            section, _, option = key.rpartition(".")
            if section in found:
                found[section][option] = str(ast.literal_eval(value))
        merged: dict[str, str] = {}
        for section in reversed(_SECTIONS):
            merged.update(found[section])
        return cls(merged)

    def words(self, option: str) -> list[str]:
        """The value of an option that takes several, as a list."""
        return self.options.get(option, "").split()

    def client(self) -> PyPIClient:
        """An HTTP client with pip's certificates, proxy, time-out, trusted hosts and credentials."""
        verify: ssl.SSLContext | bool = True
        cert = self.options.get("client-cert")
        if bundle := self.options.get("cert"):
            try:
                verify = ssl.create_default_context(cafile=bundle)
            except OSError as error:
                raise SourceError(
                    f"{bundle}: pip's certificate bundle cannot be read: {error}", cure="mend pip's option 'cert'"
                ) from None
        timeout = float(self.options.get("default-timeout", self.options.get("timeout", "60")))
        client = _Client(
            verify=verify,
            cert=cert,
            proxy=self.options.get("proxy") or None,
            trusted_hosts=self.words("trusted-host"),
            timeout=timeout,
            follow_redirects=True,
        )
        urls = [*self.words("index-url"), *self.words("extra-index-url")]
        client.auth = MultiDomainBasicAuth(prompting=sys.stdin.isatty(), index_urls=urls)
        return client

    def finder(self, client: PyPIClient) -> PackageFinder:
        """A finder over the configured indexes; where none is configured, over the library's default.

        Raises:
            SourceError: pip is told to use no index and given no folder of files either.
        """
        fetcher = cast("Fetcher", client)  # it is one, though its methods take more than the protocol asks for
        find_links = [_url(place) for place in self.words("find-links")]
        if self.options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            if not find_links:
                raise SourceError(
                    "pip is configured with no-index and without find-links, so nothing can be resolved",
                    cure="set PIP_FIND_LINKS to a folder that holds the upstream files, or unset PIP_NO_INDEX",
                )
            return PackageFinder(fetcher, find_links=find_links, ignore_compatibility=True)
        index_urls = [_url(place) for place in self.words("index-url")]
        finder = PackageFinder(fetcher, index_urls=index_urls, ignore_compatibility=True)
        for url in map(_url, self.words("extra-index-url")):
            finder.add_index_url(url)
        for url in find_links:
            finder.add_find_links(url)
        return finder


def _url(place: str) -> str:
    """pip takes a folder or a file where it takes an address."""
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()
