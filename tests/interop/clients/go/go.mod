module interop.local/client

go 1.25.0

require google.golang.org/grpc v1.85.0
