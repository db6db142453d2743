"""Names of the RPCs that carry prompts or many reports, as limits and metrics use them."""

ROUTE = "/kvroute.v1.Router/Route"
EXPLAIN = "/kvroute.v1.Router/Explain"
ROUTE_STREAM = "/kvroute.v1.Router/RouteStream"
REPORT = "/kvroute.v1.Router/Report"
RENDER = "/kvroute.v1.Prompts/Render"
