"""The methods of kvroute.v1.Router by their full names, as limits and metrics know them."""

ROUTE = "/kvroute.v1.Router/Route"
EXPLAIN = "/kvroute.v1.Router/Explain"
ROUTE_STREAM = "/kvroute.v1.Router/RouteStream"
REPORT = "/kvroute.v1.Router/Report"
