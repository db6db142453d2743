"""Methods whose messages hold prompts or many reports, by the names that limits and metrics use."""

ROUTE = "/kvroute.v1.Router/Route"
EXPLAIN = "/kvroute.v1.Router/Explain"
ROUTE_STREAM = "/kvroute.v1.Router/RouteStream"
REPORT = "/kvroute.v1.Router/Report"
RENDER = "/kvroute.v1.Prompts/Render"
