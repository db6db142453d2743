"""kvroute's server under h2spec: what fails is on a list, and what is on the list fails."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from router.net.keys.certificates import Certificates
from tests.interop.binaries import H2SPEC
from tests.interop.stage import run, serving
from tests.stage.certificates import Authority, written

CASES = 146
LEFT = {
    "generic/4: Sends a HEAD request": "a call of gRPC is POST: the stream is reset, as with GET",
    "http2/5.1: closed: Sends a HEADERS frame": (
        "RFC 9113, 5.1, has an error of the connection; kvroute ends the stream with STREAM_CLOSED,"
        " since the calls of others may be on the connection behind a proxy. Such frames count as"
        " ones that carry nothing, and so have their bound"
    ),
    "http2/5.1.1: Sends stream identifier that is numerically smaller than previous": (
        "the same: the numbers below the last stream's are of streams that are over; which of them"
        " were never opened is not kept"
    ),
}
"""Cases that fail, with the reason."""


@pytest.mark.parametrize("tls", [False, True])
async def test_all_cases_pass_but_those_on_the_list(tmp_path: Path, tls: bool) -> None:
    report = tmp_path / "report.xml"
    certificates = Certificates(written(tmp_path, Authority().issue())) if tls else None
    flags = ("-t", "-k") if tls else ()
    async with serving(certificates) as server:
        target = ("-h", "127.0.0.1", "-p", str(server.port), "-P", "/kvroute.interop.Seen/Whole")
        command = (H2SPEC.path, *target, "-S", "-o", "3", "-j", report, *flags)
        _, output = await run(*command, span_s=400.0)
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) == CASES, output
    failed = {
        f"{case.get('package')}: {case.get('classname')}"
        for case in cases
        if any(child.tag in ("error", "failure", "skipped") for child in case)
    }
    assert failed == set(LEFT), output
