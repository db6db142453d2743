{{/* Names and labels. */}}

{{- define "kvroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 46 characters: the longest thing appended, -example-engine, stays within a DNS label. */}}
{{- define "kvroute.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 46 | trimSuffix "-" }}
{{- else }}
{{- $name := include "kvroute.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 46 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 46 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvroute.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvroute.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* What a selector may rest on: nothing that a new release or value changes. */}}
{{- define "kvroute.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end }}

{{- define "kvroute.engineSelectorLabels" -}}
app.kubernetes.io/name: {{ include "kvroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: example-engine
{{- end }}

{{- define "kvroute.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvroute
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selectorLabels" . }}
{{ include "kvroute.commonLabels" . }}
{{- end }}

{{- define "kvroute.engineLabels" -}}
{{ include "kvroute.engineSelectorLabels" . }}
{{ include "kvroute.commonLabels" . }}
{{- end }}

{{/* repository@digest, else repository:tag. Takes {image, tag}: tag is the one of an image without. */}}
{{- define "kvroute.imageOf" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) }}
{{- end }}
{{- end }}

{{- define "kvroute.image" -}}
{{ include "kvroute.imageOf" (dict "image" .Values.image "tag" .Chart.AppVersion) }}
{{- end }}

{{/* Ports follow the addresses in the configuration, so that they are said once. */}}
{{- define "kvroute.grpcPort" -}}
{{ regexFind "[0-9]+$" .Values.config.grpc.listen }}
{{- end }}

{{/* Empty without an endpoint. */}}
{{- define "kvroute.metricsPort" -}}
{{ regexFind "[0-9]+$" .Values.config.metrics.listen }}
{{- end }}

{{/* `true` if the metrics are served over TLS; empty otherwise. */}}
{{- define "kvroute.metricsTls" -}}
{{- if has (default "off" .Values.config.metrics.tls) (list "server" "mutual") }}true{{ end }}
{{- end }}

{{/* Port of Envoy's endpoint picker; empty without one. */}}
{{- define "kvroute.pickerPort" -}}
{{ regexFind "[0-9]+$" (include "kvroute.pickerListen" .) }}
{{- end }}

{{/* `true` if the picker takes no connections without TLS; empty otherwise. */}}
{{- define "kvroute.pickerTlsOnly" -}}
{{- if and (include "kvroute.pickerPort" .) .Values.tls.enabled (ne "optional" (dig "tls" "optional" (default dict .Values.config.picker))) }}true{{ end }}
{{- end }}

{{/* An InferencePool needs a picker. */}}
{{- define "kvroute.pickerListen" -}}
{{- $listen := default "" (default dict .Values.config.picker).listen }}
{{- if and (not $listen) .Values.inferencePool.create }}
{{- $listen = "[::]:9002" }}
{{- end }}
{{- $listen }}
{{- end }}

{{/* Port of OpenAI's API; empty without it. */}}
{{- define "kvroute.gatewayPort" -}}
{{ regexFind "[0-9]+$" (default "" (default dict .Values.config.gateway).listen) }}
{{- end }}

{{/* `true` if routers watch pods; empty otherwise. */}}
{{- define "kvroute.discovery" -}}
{{- if (default dict (default dict .Values.config.discovery).kubernetes).enabled }}true{{ end }}
{{- end }}

{{/* `true` if routers call Kubernetes' API; empty otherwise. */}}
{{- define "kvroute.kubernetesApi" -}}
{{- if or (include "kvroute.discovery" .) (and .Values.keys.enabled .Values.keys.accounts) }}true{{ end }}
{{- end }}

{{/* Routers of the Deployment. A manifest without the number would stop all of them but one, so with
autoscaling it is the number that is there, within the autoscaler's bounds. */}}
{{- define "kvroute.replicas" -}}
{{- if .Values.autoscaling.enabled }}
{{- $there := lookup "apps/v1" "Deployment" .Release.Namespace (include "kvroute.fullname" .) }}
{{- $count := dig "spec" "replicas" .Values.autoscaling.minReplicas $there }}
{{- max .Values.autoscaling.minReplicas (min .Values.autoscaling.maxReplicas $count) }}
{{- else }}
{{- .Values.replicaCount }}
{{- end }}
{{- end }}

{{/* Namespace of the pods that routers watch. */}}
{{- define "kvroute.discoveryNamespace" -}}
{{- default .Release.Namespace (default dict (default dict .Values.config.discovery).kubernetes).namespace }}
{{- end }}

{{/* Ports at engines that routers connect to, as a JSON list. */}}
{{- define "kvroute.enginePorts" -}}
{{- $ports := .Values.networkPolicy.enginePorts }}
{{- if include "kvroute.discovery" . }}
{{- $pods := include "kvroute.discovered" . | fromJson }}
{{- range $place, $port := $pods.ports }}
{{- $ports = append $ports $port }}
{{- range $own := list (dig "events_port" 5557 $pods) (dig "replay_port" 5558 $pods) }}
{{- if $own }}
{{- $ports = append $ports (add $own $place) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $numbers := list }}
{{- range $ports }}
{{- $numbers = append $numbers (int .) }}
{{- end }}
{{- uniq $numbers | toJson }}
{{- end }}

{{/* discovery.kubernetes, with selector and ports of a pool that is made here, as JSON. */}}
{{- define "kvroute.discovered" -}}
{{- $pods := deepCopy (default dict (default dict .Values.config.discovery).kubernetes) }}
{{- if and .Values.inferencePool.create (not $pods.selector) (not $pods.pool) }}
{{- $terms := list }}
{{- range $key, $value := .Values.inferencePool.matchLabels }}
{{- $terms = append $terms (printf "%s=%s" $key $value) }}
{{- end }}
{{- $_ := set $pods "selector" (join "," $terms) }}
{{- $_ := set $pods "ports" .Values.inferencePool.targetPorts }}
{{- end }}
{{- if not $pods.ports }}
{{- $_ := set $pods "ports" (list 8000) }}
{{- end }}
{{- toJson $pods }}
{{- end }}

{{- define "kvroute.testLabels" -}}
app.kubernetes.io/name: {{ include "kvroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{/* The Secret with a token for `helm test`, as {name, key} in JSON; empty: callers need none. */}}
{{- define "kvroute.testToken" -}}
{{- if .Values.keys.enabled }}
{{- if .Values.helmTest.tokenSecret.name }}
{{- .Values.helmTest.tokenSecret | toJson }}
{{- else if not .Values.keys.existingSecret }}
{{- dict "name" (include "kvroute.keysSecret" .) "key" "token" | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{/* `true` if there is a test: it needs a token wherever callers do, and has no certificate. */}}
{{- define "kvroute.helmTest" -}}
{{- $token := or (not .Values.keys.enabled) (include "kvroute.testToken" .) }}
{{- if and .Values.helmTest.enabled $token (not .Values.tls.clientCertificates) }}true{{ end }}
{{- end }}

{{/* --- NATS of this release --- */}}

{{- define "kvroute.natsName" -}}
{{ include "kvroute.fullname" . }}-nats
{{- end }}

{{- define "kvroute.natsSelectorLabels" -}}
app.kubernetes.io/name: {{ include "kvroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: nats
{{- end }}

{{- define "kvroute.natsLabels" -}}
{{ include "kvroute.natsSelectorLabels" . }}
{{ include "kvroute.commonLabels" . }}
{{- end }}

{{/* The NATS server's URL; empty: a router runs its own. */}}
{{- define "kvroute.natsUrl" -}}
{{- if .Values.nats.server.enabled -}}
tls://{{ include "kvroute.natsName" . }}.{{ .Release.Namespace }}.svc:4222
{{- else -}}
{{ default "" (default dict .Values.config.nats).url }}
{{- end -}}
{{- end }}

{{/* Names in the certificate of the NATS servers, as a JSON list. */}}
{{- define "kvroute.natsHostNames" -}}
{{- $names := list "localhost" }}
{{- range $host := list (include "kvroute.natsName" .) (printf "*.%s-headless" (include "kvroute.natsName" .)) }}
{{- range $end := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) (printf ".%s.svc.cluster.local" $.Release.Namespace) }}
{{- $names = append $names (printf "%s%s" $host $end) }}
{{- end }}
{{- end }}
{{- $names | toJson }}
{{- end }}

{{/* Permissions as `kvroute nats-permissions` prints them; relays share a user, so theirs are for any
worker. Routers have both: they run relays, too. */}}
{{- define "kvroute.natsConfig" -}}
{{- $root := .root }}
{{- $fleet := printf "kvroute.v1.%s" $root.Values.config.fleet.name }}
{{- $name := include "kvroute.natsName" $root }}
server_name: $POD_NAME
port: 4222
http_port: 8222
pid_file: "/var/run/nats/nats.pid"
lame_duck_grace_period: "5s"
lame_duck_duration: "30s"
tls: { cert_file: "/etc/nats/tls.crt", key_file: "/etc/nats/tls.key" }
ROUTER = {
  publish = ["{{ $fleet }}.hello", "{{ $fleet }}.control", "{{ $fleet }}.snapshot.*.*", "{{ $fleet }}.warm.*.*", "{{ $fleet }}.inflight.*", "{{ $fleet }}.report.*", "{{ $fleet }}.facts.*.*", "{{ $fleet }}.load.*.*"]
  subscribe = ["{{ $fleet }}.facts.*.*", "{{ $fleet }}.load.*.*", "{{ $fleet }}.hello", "{{ $fleet }}.control", "{{ $fleet }}.inflight.*", "{{ $fleet }}.report.*", "{{ $fleet }}.snapshot.*.*", "{{ $fleet }}.warm.*.*", "_INBOX.>"]
  allow_responses = true
}
RELAY = {
  publish = ["{{ $fleet }}.facts.*.*", "{{ $fleet }}.load.*.*"]
  subscribe = ["{{ $fleet }}.snapshot.*.*", "{{ $fleet }}.warm.*.*", "{{ $fleet }}.hello"]
  allow_responses = true
}
authorization = {
  users = [
    { user: "router", password: "{{ index .passwords "router-password" }}", permissions: $ROUTER }
    { user: "relay", password: "{{ index .passwords "relay-password" }}", permissions: $RELAY }
  ]
}
{{- if gt (int $root.Values.nats.server.replicas) 1 }}
cluster = {
  name: "{{ $name }}"
  port: 6222
  # Clients know the Service's name, which is in the certificate; a pod's address is not.
  no_advertise: true
  authorization: { user: "route", password: "{{ index .passwords "route-password" }}", timeout: 5 }
  tls: { cert_file: "/etc/nats/tls.crt", key_file: "/etc/nats/tls.key", ca_file: "/etc/nats/ca.crt", verify: true, timeout: 5 }
  routes: [
    {{- range $i := until (int $root.Values.nats.server.replicas) }}
    "nats-route://route:{{ index $.passwords "route-password" }}@{{ $name }}-{{ $i }}.{{ $name }}-headless.{{ $root.Release.Namespace }}.svc:6222"
    {{- end }}
  ]
}
{{- end }}
{{- end }}

{{/* Empty without an endpoint. */}}
{{- define "kvroute.probesPort" -}}
{{ regexFind "[0-9]+$" (default dict .Values.config.probes).listen }}
{{- end }}

{{- define "kvroute.tlsSecret" -}}
{{- default (printf "%s-tls" (include "kvroute.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{- define "kvroute.keysSecret" -}}
{{- default (printf "%s-keys" (include "kvroute.fullname" .)) .Values.keys.existingSecret }}
{{- end }}

{{/* Names under which clients call the routers, as a JSON list. */}}
{{- define "kvroute.hostNames" -}}
{{- $names := list "localhost" }}
{{- range $name := list (include "kvroute.fullname" .) (printf "%s-headless" (include "kvroute.fullname" .)) }}
{{- range $end := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) (printf ".%s.svc.cluster.local" $.Release.Namespace) }}
{{- $names = append $names (printf "%s%s" $name $end) }}
{{- end }}
{{- end }}
{{- concat (rest $names) (list "localhost") .Values.tls.extraNames | toJson }}
{{- end }}

{{/* `true` if the chart makes the certificate; empty otherwise. */}}
{{- define "kvroute.trialCertificate" -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) (not .Values.tls.certManager.enabled) }}true{{ end }}
{{- end }}

{{/* The trial's certificate as data of a Secret, in YAML: that of the cluster, else one that is made once in
a rendering and kept in .Values, since the CA is in a ConfigMap, too. */}}
{{- define "kvroute.trialPair" -}}
{{- if not (hasKey .Values "trialPair") }}
{{- $name := include "kvroute.tlsSecret" . }}
{{- $known := lookup "v1" "Secret" .Release.Namespace $name }}
{{- if $known }}
{{- $_ := set .Values "trialPair" $known.data }}
{{- else }}
{{- $names := include "kvroute.hostNames" . | fromJsonArray }}
{{- $ca := genCA (printf "%s-ca" $name) 3650 }}
{{- $pair := genSignedCert (first $names) nil $names 3650 $ca }}
{{- $_ := set .Values "trialPair" (dict "ca.crt" (b64enc $ca.Cert) "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key)) }}
{{- end }}
{{- end }}
{{- toYaml .Values.trialPair }}
{{- end }}

{{/* Name of the ConfigMap with the CA of the routers' certificate, for gateways; empty: there is none. */}}
{{- define "kvroute.caConfigMap" -}}
{{- $own := ternary (printf "%s-ca" (include "kvroute.fullname" .)) "" (eq "true" (include "kvroute.trialCertificate" .)) }}
{{- default $own .Values.gatewayRoute.caConfigMap }}
{{- end }}

{{/* appProtocol of a port, which gateways and meshes believe: https wherever it speaks TLS. Takes {tls, plain}. */}}
{{- define "kvroute.appProtocol" -}}
{{- ternary "https" .plain .tls }}
{{- end }}

{{/* config.yaml: the values, and the paths of the files that Secrets bring. */}}
{{- define "kvroute.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $nats := default dict $config.nats }}
{{- if .Values.nats.credentialsSecret.name }}
{{- $_ := set $nats "credentials_file" (include "kvroute.natsCredentialsFile" .) }}
{{- end }}
{{- with include "kvroute.natsUrl" . }}
{{- $_ := set $nats "url" . }}
{{- end }}
{{- if .Values.nats.server.enabled }}
{{- $_ := set $nats "tls_ca_file" "/etc/kvroute-nats/tls/ca.crt" }}
{{- end }}
{{- with .Values.nats.tlsSecret }}
{{- if .name }}
{{- $_ := set $nats "tls_ca_file" (printf "/etc/kvroute-nats/tls/%s" .caKey) }}
{{- if .clientCertificate }}
{{- $_ := set $nats "tls_certificate_file" "/etc/kvroute-nats/tls/tls.crt" }}
{{- $_ := set $nats "tls_key_file" "/etc/kvroute-nats/tls/tls.key" }}
{{- end }}
{{- end }}
{{- end }}
{{- $_ := set $config "nats" $nats }}
{{- if .Values.tls.enabled }}
{{- $tls := default dict $config.tls }}
{{- $_ := set $tls "certificate_file" "/etc/kvroute-tls/tls.crt" }}
{{- $_ := set $tls "key_file" "/etc/kvroute-tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca_file" "/etc/kvroute-tls/ca.crt" }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- end }}
{{- if .Values.keys.enabled }}
{{- $_ := set $config "keys" (dict "file" "/etc/kvroute-keys/keys.yaml") }}
{{- end }}
{{- if .Values.keys.engineSecret.name }}
{{- $engines := default dict $config.engines }}
{{- $_ := set $engines "api_key_file" (printf "/etc/kvroute-engine-key/%s" .Values.keys.engineSecret.key) }}
{{- $_ := set $config "engines" $engines }}
{{- end }}
{{- with include "kvroute.pickerListen" . }}
{{- $_ := set $config "picker" (merge (dict "listen" .) (default dict $config.picker)) }}
{{- end }}
{{- if include "kvroute.discovery" . }}
{{- $_ := set $config "discovery" (dict "kubernetes" (include "kvroute.discovered" . | fromJson)) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- define "kvroute.natsCredentialsFile" -}}
/etc/kvroute-nats/credentials/{{ .Values.nats.credentialsSecret.key }}
{{- end }}

{{/* The Secret of user and password: {name, userKey, passwordKey}, as JSON. Takes {root, user}: router
or relay, which differ only at NATS of this release. */}}
{{- define "kvroute.natsUser" -}}
{{- if .root.Values.nats.server.enabled }}
{{- dict "name" (include "kvroute.natsName" .root) "userKey" (printf "%s-user" .user) "passwordKey" (printf "%s-password" .user) | toJson }}
{{- else }}
{{- .root.Values.nats.userSecret | toJson }}
{{- end }}
{{- end }}

{{/* User and password never touch a ConfigMap. Takes {root, user}. */}}
{{- define "kvroute.natsUserEnv" -}}
{{- with include "kvroute.natsUser" . | fromJson }}
{{- if .name }}
- name: KVROUTE_NATS_USER
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .userKey }}}
- name: KVROUTE_NATS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .passwordKey }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvroute.natsVolumeMounts" -}}
{{- if .Values.nats.credentialsSecret.name }}
- {name: nats-credentials, mountPath: /etc/kvroute-nats/credentials, readOnly: true}
{{- end }}
{{- if or .Values.nats.tlsSecret.name .Values.nats.server.enabled }}
- {name: nats-tls, mountPath: /etc/kvroute-nats/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvroute.natsVolumes" -}}
{{- with .Values.nats.credentialsSecret }}
{{- if .name }}
- name: nats-credentials
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: {{ .key }}}
{{- end }}
{{- end }}
{{- if .Values.nats.server.enabled }}
- name: nats-tls
  secret:
    secretName: {{ include "kvroute.natsName" . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- with .Values.nats.tlsSecret }}
{{- if .name }}
- name: nats-tls
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "kvroute.keyVolumeMounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/kvroute-tls, readOnly: true}
{{- end }}
{{- if .Values.keys.enabled }}
- {name: keys, mountPath: /etc/kvroute-keys, readOnly: true}
{{- end }}
{{- if .Values.keys.engineSecret.name }}
- {name: engine-key, mountPath: /etc/kvroute-engine-key, readOnly: true}
{{- end }}
{{- end }}

{{/* Of the keys only the hashes: no router sees a token. */}}
{{- define "kvroute.keyVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "kvroute.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.keys.engineSecret }}
{{- if .name }}
- name: engine-key
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: {{ .key }}}
{{- end }}
{{- end }}
{{- if .Values.keys.enabled }}
- name: keys
  secret:
    secretName: {{ include "kvroute.keysSecret" . }}
    defaultMode: 0440
    items:
      - {key: keys.yaml, path: keys.yaml}
{{- end }}
{{- end }}

{{/* Seconds after SIGTERM that the gateway and the picker may take for their open requests, at the
same time; gRPC's drain comes after them. The picker's begins when it takes no more requests. */}}
{{- define "kvroute.portDrainSeconds" -}}
{{- $settings := default dict .Values.config.requests }}
{{- $open := default 300 $settings.drain_timeout_s }}
{{- if include "kvroute.pickerPort" . }}
{{- addf $open (default 5 $settings.accept_after_stop_s) }}
{{- else if include "kvroute.gatewayPort" . }}
{{- $open }}
{{- else }}0{{ end }}
{{- end }}

{{/* SIGKILL comes after preStop, the drains, and a margin to leave in. */}}
{{- define "kvroute.terminationGracePeriodSeconds" -}}
{{- $needed := addf (include "kvroute.portDrainSeconds" .) (default 30 .Values.config.drain_timeout_s) .Values.preStopSleepSeconds }}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds }}
{{- addf (ceil $needed) 10 | int }}
{{- else if le (float64 .Values.terminationGracePeriodSeconds) $needed }}
{{- fail (printf "terminationGracePeriodSeconds (%v) must be longer than preStopSleepSeconds, the drains of gateway and picker (config.requests), and config.drain_timeout_s together (%v)" .Values.terminationGracePeriodSeconds $needed) }}
{{- else }}
{{- int .Values.terminationGracePeriodSeconds }}
{{- end }}
{{- end }}

{{/* Labels and annotations of an alert, up to its summary. Takes (root, severity, alert). */}}
{{- define "kvroute.alert" -}}
{{- $root := index . 0 }}
{{- $rule := $root.Values.prometheusRule }}
{{- $own := dict "severity" (index . 1) "namespace" $root.Release.Namespace "fleet" $root.Values.config.fleet.name -}}
labels:
  {{- merge $own $rule.alertLabels | toYaml | nindent 2 }}
annotations:
  {{- with $rule.playbookUrl }}
  runbook_url: {{ printf "%s#%s" . (index $ 2 | lower) | quote }}
  {{- end }}
{{- end }}

{{/* Bytes of a Kubernetes quantity, such as 5Gi; a number, too. */}}
{{- define "kvroute.bytes" -}}
{{- $text := toString . }}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text }}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 0x1p10 "Mi" 0x1p20 "Gi" 0x1p30 "Ti" 0x1p40 "Pi" 0x1p50 "Ei" 0x1p60 }}
{{- $unit := trimPrefix $number $text }}
{{- if or (not $number) (not (hasKey $units $unit)) }}
{{- fail (printf "resources.limits.memory: %s is no quantity, such as 5Gi" $text) }}
{{- end }}
{{- mulf $number (get $units $unit) }}
{{- end }}

{{/* What a schema can't say: values that contradict one another. The Deployment asks first. */}}
{{- define "kvroute.validate" -}}
{{- $url := include "kvroute.natsUrl" . }}
{{- with .Values.nats }}
{{- if and .server.enabled (or (default dict $.Values.config.nats).url .credentialsSecret.name .userSecret.name .tlsSecret.name) }}
{{- fail "nats.server.enabled makes users and certificates of its own: leave config.nats.url, nats.credentialsSecret, nats.userSecret and nats.tlsSecret empty." }}
{{- end }}
{{- end }}
{{- if contains "@" (default "" $url) }}
{{- fail "config.nats.url carries a user or a password, and would stand in a ConfigMap: use nats.userSecret." }}
{{- end }}
{{- $nats := default dict .Values.config.nats }}
{{- if and $url (not (regexMatch "^(tls|wss)://|^[a-z]+://(localhost|127\\.|\\[::1\\])" $url)) (not .Values.nats.tlsSecret.name) (not $nats.tls_ca_file) (not $nats.allow_plaintext) }}
{{- fail "config.nats.url leads off the pod without TLS: set nats.tlsSecret.name or a URL with tls://, or config.nats.allow_plaintext to let the network read credentials and prompts." }}
{{- end }}
{{- if not $url }}
{{- if .Values.autoscaling.enabled }}
{{- fail "autoscaling.enabled needs config.nats.url or nats.server.enabled: replicas can't share the NATS server that a router embeds." }}
{{- end }}
{{- if gt (int .Values.replicaCount) 1 }}
{{- fail "replicaCount is over 1 and config.nats.url is empty: replicas can't share the NATS server that a router embeds. Set config.nats.url or nats.server.enabled." }}
{{- end }}
{{- if .Values.exampleEngine.enabled }}
{{- fail "exampleEngine.enabled needs config.nats.url: the NATS server that a router embeds listens on loopback, where no relay of another pod reaches it." }}
{{- end }}
{{- if not .Values.nats.embedded }}
{{- fail "config.nats.url is empty and nats.embedded is false: name a NATS server." }}
{{- end }}
{{- end }}
{{- with (default dict .Values.resources.limits).memory }}
{{- $index := int (default 4096 (default dict $.Values.config.index).memory_mib) }}
{{- if lt (float64 (include "kvroute.bytes" .)) (mulf (addf $index 512) 0x1p20) }}
{{- fail (printf "resources.limits.memory (%v) leaves the router less than 512Mi beside its index: raise it, or lower config.index.memory_mib (%d)." . $index) }}
{{- end }}
{{- end }}
{{- if and (not .Values.keys.enabled) (not (and .Values.tls.enabled .Values.tls.clientCertificates)) (not .Values.config.grpc.any_address) }}
{{- fail "keys.enabled is false and tls.clientCertificates too: routers would serve callers without keys. Set config.grpc.any_address if that is meant." }}
{{- end }}
{{- if not (include "kvroute.probesPort" .) }}
{{- fail "config.probes.listen is empty: the kubelet calls it, since its probes bring no key." }}
{{- end }}
{{- $startup := mul .Values.probes.startup.periodSeconds .Values.probes.startup.failureThreshold }}
{{- if le (float64 $startup) (float64 (default 30 .Values.config.ready_timeout_s)) }}
{{- fail (printf "probes.startup allows %d s, no longer than config.ready_timeout_s: the kubelet would restart routers that wait for their index." $startup) }}
{{- end }}
{{- with .Values.networkPolicy }}
{{- if and .enabled $.Values.config.workers (not .extraEgress) }}
{{- fail "networkPolicy.enabled with config.workers needs networkPolicy.extraEgress: the router connects to those engines." }}
{{- end }}
{{- end }}
{{- with .Values.engineScaling }}
{{- if and .enabled (or (not .prometheus) (not .model) (not .deployment)) }}
{{- fail "engineScaling.enabled needs engineScaling.deployment, engineScaling.model and engineScaling.prometheus." }}
{{- end }}
{{- end }}
{{- if and .Values.relayMonitor.enabled (not .Values.relayMonitor.matchLabels) }}
{{- fail "relayMonitor.enabled needs relayMonitor.matchLabels: the labels of the engines' pods." }}
{{- end }}
{{- if include "kvroute.discovery" . }}
{{- $pods := include "kvroute.discovered" . | fromJson }}
{{- if eq (empty $pods.selector) (empty $pods.pool) }}
{{- fail "config.discovery.kubernetes.enabled needs either a selector or a pool." }}
{{- end }}
{{- if not .Values.serviceAccount.create }}
{{- if not .Values.serviceAccount.name }}
{{- fail "config.discovery.kubernetes.enabled needs a service account of its own: serviceAccount.create, or a name." }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.inferencePool.create (not .Values.inferencePool.matchLabels) }}
{{- fail "inferencePool.create needs inferencePool.matchLabels: the labels of the engines' pods." }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (not (include "kvroute.metricsPort" .)) }}
{{- fail "serviceMonitor.enabled needs config.metrics.listen." }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (eq "mutual" (default "off" .Values.config.metrics.tls)) (not .Values.serviceMonitor.tlsConfig) }}
{{- fail "serviceMonitor.enabled with config.metrics.tls mutual needs serviceMonitor.tlsConfig: routers take only scrapers with a certificate." }}
{{- end }}
{{- with .Values.gatewayRoute }}
{{- if .parentRefs }}
{{- if not (include "kvroute.gatewayPort" $) }}
{{- fail "gatewayRoute.parentRefs needs config.gateway.listen: the port of OpenAI's API." }}
{{- end }}
{{- if and $.Values.tls.enabled (not (include "kvroute.caConfigMap" $)) }}
{{- fail "gatewayRoute.parentRefs needs gatewayRoute.caConfigMap: a ConfigMap with ca.crt of the certificate, which the chart did not make." }}
{{- end }}
{{- if $.Values.tls.clientCertificates }}
{{- fail "gatewayRoute.parentRefs with tls.clientCertificates: a BackendTLSPolicy brings no certificate of the gateway." }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not (include "kvroute.gatewayPort" .)) }}
{{- fail "ingress.enabled needs config.gateway.listen: the port of OpenAI's API." }}
{{- end }}
{{- if and .Values.keys.accounts (not .Values.keys.existingSecret) }}
{{- fail "keys.accounts needs keys.existingSecret: a key file with accounts and issuers." }}
{{- end }}
{{- end }}
