"""The relay of a Dynamo fleet: the KV events of its workers become ordered facts on NATS."""
