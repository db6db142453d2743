"""Commands that run until they are stopped: router, relay, gateway, endpoint picker."""
