"""TLS of the gRPC server, with certificates that change while it runs."""

import grpc

from router.keys.certificates import Certificates, Pem


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that take up changed certificates at the next connection.

    gRPC asks for the certificates at each handshake, on a thread of its own. TLS 1.2 is its oldest
    version.
    """
    shown = [certificates.pem]

    def latest() -> grpc.ServerCertificateConfiguration | None:
        pem = certificates.pem
        if pem is shown[0]:
            return None  # as before
        shown[0] = pem
        return _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown[0]),
        latest,  # type: ignore[arg-type]  # None stands for "as before", by gRPC's documentation
        require_client_authentication=certificates.asks_callers,
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.certificate)], root_certificates=pem.client_ca
    )
