"""What a key file may say, and whose a key is."""

from typing import Any

import pytest

from router.config.keys import ConfigError
from router.net.keys.identity import Identity
from router.net.keys.key_ring import KeyRing, digest, new_token
from router.net.keys.rights import Right
from router.request.refusal import Reason, Refusal
from tests.stage.keys import hashed, identity


def ring(*identities: dict[str, Any], **parts: Any) -> KeyRing:
    return KeyRing.of({"identities": list(identities)} | parts)


def test_several_tokens_of_an_identity_count_at_once() -> None:
    keys = ring(identity("a", tokens=[hashed("old"), hashed("new")]))
    for token in ("old", "new"):
        found = keys.of_token(digest(token))
        assert found is not None
        assert found.name == "a"
    assert keys.of_token(digest("other")) is None


def test_a_new_token_is_found_by_its_hash_and_is_long() -> None:
    token, line = new_token()
    assert ring(identity("a", tokens=[line])).of_token(digest(token)) is not None
    assert len(token) >= 40
    assert token != new_token()[0]


def test_certificates_and_accounts_belong_to_identities() -> None:
    issuer = {"issuer": "https://cluster", "audience": "kvroute", "jwks": "https://cluster/keys"}
    account = {"issuer": "https://cluster", "subject": "system:serviceaccount:chat:gateway"}
    keys = ring(
        identity("a", tokens=[], certificates=["spiffe://fleet/gateway", "cn:gateway"]),
        identity("b", tokens=[], accounts=[account]),
        issuers=[issuer],
    )
    of_certificate = keys.of_certificate(["dns.example", "spiffe://fleet/gateway"])
    assert of_certificate is not None
    assert of_certificate.name == "a"
    assert keys.of_certificate(["gateway"]) is None
    of_account = keys.of_account("https://cluster", "system:serviceaccount:chat:gateway")
    assert of_account is not None
    assert of_account.name == "b"
    assert keys.of_account("https://other", "system:serviceaccount:chat:gateway") is None


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (None, "Expected `object`"),
        ({}, "missing required field `identities`"),
        ({"identities": [{"name": "a"}]}, "missing required field `rights`"),
        ({"identities": [identity("a", rights=("all",))]}, "'all' is none of "),
        ({"identities": [identity("a", tokens=["secret"])]}, "matching regex"),
        ({"identities": [identity("a", typo=1)]}, "unknown key `typo`"),
        ({"identities": [identity("a"), identity("a", tokens=[])]}, "is used twice"),
        (
            {"identities": [identity("a"), identity("b", tokens=[hashed("a-token")])]},
            "'a' and 'b' have the same key",
        ),
        (
            {"identities": [identity("a", accounts=[{"issuer": "x", "subject": "y"}])]},
            "issuer is not listed",
        ),
        (
            {
                "identities": [],
                "issuers": [{"issuer": "i", "audience": "a", "jwks": "http://i/keys"}],
            },
            "expected an https:// or file:// URL",
        ),
        ({"identities": [identity("a", limits={"streams": 0})]}, "Expected `int` >= 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(tree: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        KeyRing.of(tree)


def test_an_identity_has_its_rights_models_and_workers_and_no_others() -> None:
    caller = Identity("a", frozenset({Right.ROUTE}), models=("llama-*", "qwen"), workers=("gpu-?",))
    caller.check_right(Right.ROUTE)
    caller.check_model("llama-3")
    caller.check_model("qwen")
    caller.check_worker("gpu-1")
    for check in (
        lambda: caller.check_right(Right.ADMINISTER),
        lambda: caller.check_model("mistral"),
        lambda: caller.check_model(""),
        lambda: caller.check_model("Qwen"),
        lambda: caller.check_worker("gpu-12"),
    ):
        with pytest.raises(Refusal) as refused:
            check()
        assert refused.value.reason is Reason.PERMISSION_DENIED
