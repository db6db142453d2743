"""KvRouteClient, and the calls that it is made of: a file for each service or step."""
