"""Commands that run until they are stopped: the router, relays, the gateway, the endpoint picker."""
