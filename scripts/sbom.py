"""The wheel's software bill of materials (CycloneDX 1.6, placed in the wheel by PEP 770).

A patched wheel is what CycloneDX calls a component with a pedigree: its ancestor is upstream's wheel, and the
patches say how it departs from it. Nothing in the document depends on when or where it is written.
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from datetime import UTC, datetime

from cyclonedx.model import (
    AttachedText,
    Encoding,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.issue import IssueClassification, IssueType, IssueTypeSource
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts import provenance
from scripts.archive import DateTime
from scripts.pins import Project
from scripts.sources import Build, PatchInfo

#: The document's name below `<dist-info>/sboms/`.
FILE_NAME = "vllm-sm120.cdx.json"


def document(build: Build, date_time: DateTime) -> bytes:
    """The bill of materials.

    Args:
        date_time: when upstream made its wheel; the pins fix it, so it stands for the time of our build.
    """
    project, sources = build.project, build.sources
    upstream = Component(
        type=ComponentType.LIBRARY,
        name=project.name,
        version=project.version,
        purl=_purl(project, project.version, build.upstream_wheel.name),
        hashes=[_sha256(project.wheels[build.platform])],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.VCS, url=XsUri(project.repository), comment=f"tag {project.tag}"
            ),
            ExternalReference(
                type=ExternalReferenceType.SOURCE_DISTRIBUTION,
                url=XsUri(str(_purl(project, project.version, f"{project.package}-{project.version}.tar.gz"))),
                hashes=[_sha256(project.sdist)],
            ),
        ],
    )
    component = Component(
        type=ComponentType.LIBRARY,
        bom_ref=f"{project.name}@{project.local_version}",
        name=project.name,
        version=project.local_version,
        purl=_purl(project, project.local_version),
        pedigree=Pedigree(
            ancestors=[upstream],
            patches=[_patch(patch) for patch in sources.patches],
            notes=f"{provenance.path(project)} has the patches in order and the {len(sources.overlay)} overlay files",
        ),
    )
    bom = Bom(
        serial_number=_serial_number(build),
        metadata=BomMetaData(component=component, timestamp=datetime(*date_time, tzinfo=UTC)),
    )
    return (JsonV1Dot6(bom).output_as_string(indent=2) + "\n").encode()


def _serial_number(build: Build) -> uuid.UUID:
    """A name-based UUID (RFC 9562, version 5) of what decides the wheel's content, which its provenance sums up."""
    content = hashlib.sha256(provenance.render(provenance.document(build))).hexdigest()
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{build.project.repository}#{content}")


def _patch(patch: PatchInfo) -> Patch:
    # base64, because a patch may carry bytes that are not UTF-8 and its line ends matter.
    text = AttachedText(
        content=base64.b64encode(patch.text).decode(),
        content_type="text/x-patch",
        encoding=Encoding.BASE_64,
    )
    link = patch.upstream_link.split(" ")[0]  # a remark may follow it
    source = IssueTypeSource(url=XsUri(link)) if "://" in link else None
    return Patch(
        type=PatchClassification.BACKPORT if patch.upstream_status == "Backport" else PatchClassification.UNOFFICIAL,
        diff=Diff(text=text),
        resolves=[
            IssueType(
                type=IssueClassification.DEFECT,
                name=patch.name,
                description=patch.subject,
                source=source,
            )
        ],
    )


def _purl(project: Project, version: str, file: str | None = None) -> PackageURL:
    return PackageURL("pypi", None, project.name, version, {"file_name": file} if file else None)


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)
