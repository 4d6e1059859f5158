"""What an S3-compatible store or its client says, in words for people.

The client puts the whole answer into its errors, and the answer to a wrong signature quotes the
request. So its text is never passed on, but for the status, the code in the answer, and the name of
what went wrong underneath.
"""

from __future__ import annotations

import re

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_KIND = re.compile(r"kind: ([A-Z][A-Za-z]{1,30})")
_SYSTEM = re.compile(r'message: "([^"\\]{1,100})"')
_CERTIFICATE = re.compile(r"InvalidCertificate\((?:\s*\w+\()*\s*(\w{1,60})")
_METADATA = re.compile(r"/latest/(api/token|meta-data/)")  # asked by who has no credentials

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_KEYS = f"the credentials are not accepted; look at {CREDENTIALS}"
_REGION = "the bucket is in another region; say which by region="
_SLOWER = "the store asks for fewer requests; lower requests=, or spread the load over prefixes"
_RIGHTS = (
    "the credentials do not allow it: pages need s3:GetObject, s3:PutObject and s3:DeleteObject, "
    "and s3:ListBucket, without which an absent page is refused instead"
)
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL",
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "InvalidToken": _KEYS,
    "ExpiredToken": "the credentials have expired; renew them and open the storage again",
    "RequestTimeTooSkewed": "the clocks of this machine and the store differ; set this one right",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "SlowDown": _SLOWER,
    "ServiceUnavailable": _SLOWER,
    "NotImplemented": "the store cannot do this; try conditional=no and bulk_delete=no",
    "EntityTooLarge": "the store does not take pages of this size in one request",
    "QuotaExceeded": "the bucket is full; make room, or let a lifecycle rule do so",
}
_BY_STATUS = {
    "301": _REGION,
    "401": _KEYS,
    "403": f"{_RIGHTS}; or they are wrong or have expired",
    "429": _SLOWER,
    "501": _REMEDIES["NotImplemented"],
    "503": _SLOWER,
}


def explain(error: BaseException) -> str:
    """What happened, and what to do if that is known."""
    text = str(error)
    if isinstance(error, TimeoutError) or "without LOCATION" in text:
        return _REGION if "LOCATION" in text else "no answer in time"
    if "BadScheme" in text:
        return "the endpoint is of http and was not named in the URL; say endpoint=http://..."
    if _METADATA.search(text):
        return f"there are no credentials; set {CREDENTIALS}, or say anonymous=yes"
    if found := _first(_CERTIFICATE, text):
        return (
            f"the store's certificate is not accepted ({found}); name the authority that it comes "
            "from by ca=, and in the endpoint the host that it is of"
        )
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if status or code:
        return _join(f"{status} {code}".strip(), _REMEDIES.get(code) or _BY_STATUS.get(status, ""))
    below = _first(_SYSTEM, text) or _first(_KIND, text) or type(error).__name__
    return f"no proper answer ({below}); see that the store is up and the endpoint is right"


def absent(error: BaseException, *, told: bool) -> bool:
    """Whether the store says that there is no such object.

    Args:
        told: the answer has a body, which tells that from a missing bucket, or from a server that
            is no store. The answer to a HEAD has none.
    """
    if not isinstance(error, FileNotFoundError) or _METADATA.search(str(error)):
        return False
    return not told or _first(_CODE, str(error)) == "NoSuchKey"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found.group(1) if found else ""


def _join(what: str, remedy: str) -> str:
    return f"{what}: {remedy}" if remedy else what


__all__ = ["absent", "explain"]
