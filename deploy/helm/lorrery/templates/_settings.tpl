{{/* The settings file: `config` (a whole file) below `settings` (by section), with the groups of workers. */}}

{{/* What is given, as JSON, without what the pods' environment says: addresses, names, credentials. */}}
{{- define "lorrery.given" -}}
{{- $settings := .Values.config | default (.Files.Get "files/cluster.toml") | fromToml -}}
{{- if hasKey $settings "Error" -}}
{{- fail (printf "config: no TOML: %s" $settings.Error) -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.settings) -}}
{{- with $settings.tracing -}}
{{- with .headers -}}
{{- fail (printf "config: tracing.headers (%s) would be in a ConfigMap, which is no place for secrets: take it out of the file, and give it by extraEnv from a Secret, as LORRERY_TRACING__HEADERS with JSON" (keys . | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- $owned := dict
      "router" (list "listen" "http" "metrics" "schedulers" "keys")
      "scheduler" (list "listen" "metrics")
      "worker" (list "listen" "metrics" "scheduler" "name" "group")
      "tracing" (list "headers") -}}
{{- range $section, $keys := $owned -}}
{{- with get $settings $section -}}
{{- $table := . -}}
{{- range $keys -}}{{- $_ := unset $table . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- /* The names of the Services; a pattern such as lorrery-router.* would let others in. */}}
{{- $names := list "*.svc" "*.svc.cluster.local" -}}
{{- range list "router" "web" -}}
{{- $name := printf "%s-%s" (include "lorrery.fullname" $) . -}}
{{- $names = concat $names (list $name (printf "%s.%s" $name $.Release.Namespace)) -}}
{{- end -}}
{{- $_ := set $settings "allowed_hosts" (concat (get $settings "allowed_hosts" | default list) $names | uniq) -}}
{{- toRawJson (omit $settings "cluster_token" "server_tls" "client_tls") -}}
{{- end -}}

{{/* The groups of workers, as a JSON array of (name, replicas, settings, and what else the value says). */}}
{{- define "lorrery.groups" -}}
{{- $groups := .Values.workers -}}
{{- if not $groups -}}
{{- range $index, $group := get (include "lorrery.given" . | fromJson) "workers" | default list -}}
{{- $gpu := regexReplaceAll "[^a-z0-9]+" (get $group "gpu" | default "group" | lower) "-" | trunc 17 | trimAll "-" -}}
{{- $name := printf "%s-%d" $gpu $index -}}
{{- $groups = append $groups (dict "name" $name "replicas" (get $group "count" | default 1) "settings" (omit $group "count")) -}}
{{- end -}}
{{- end -}}
{{- if not $groups -}}
{{- $groups = list (dict "name" "" "replicas" .Values.worker.replicas "settings" dict) -}}
{{- end -}}
{{- $names := dict -}}
{{- range $groups -}}
{{- if hasKey $names .name -}}
{{- fail (printf "workers: two groups have the name %s; give each another" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- toRawJson $groups -}}
{{- end -}}

{{/* The whole settings file, as JSON. `count` tells `lorrery simulate` and `lorrery plan` how many there are. */}}
{{- define "lorrery.settings" -}}
{{- $workers := list -}}
{{- range include "lorrery.groups" . | fromJsonArray -}}
{{- $workers = append $workers (merge (dict "count" (int .replicas)) (.settings | default dict)) -}}
{{- end -}}
{{- toRawJson (set (include "lorrery.given" . | fromJson) "workers" $workers) -}}
{{- end -}}

{{/* Changes when pods have to start again; not when there are more or fewer workers. */}}
{{- define "lorrery.checksum" -}}
{{- $settings := include "lorrery.settings" . | fromJson -}}
{{- $kinds := list -}}
{{- range $settings.workers -}}{{- $kinds = append $kinds (omit . "count") -}}{{- end -}}
{{- toJson (set $settings "workers" $kinds) | sha256sum -}}
{{- end -}}

{{/* (root, service): seconds that a service may drain. */}}
{{- define "lorrery.drainSeconds" -}}
{{- $section := get (include "lorrery.given" .root | fromJson) .service | default dict -}}
{{- get (hasKey $section "drain_seconds" | ternary $section (dict "drain_seconds" 30)) "drain_seconds" | ceil | int -}}
{{- end -}}

{{/* A map as TOML: (table, path). Helm's own toToml would write every whole number of the values as a float. */}}
{{- define "lorrery.toml" -}}
{{- $tables := list -}}
{{- range $key := keys .table | sortAlpha -}}
{{- $value := get $.table $key -}}
{{- if kindIs "map" $value -}}
{{- $tables = append $tables $key -}}
{{- else if not (kindIs "invalid" $value) }}
{{ include "lorrery.tomlKey" $key }} = {{ include "lorrery.tomlValue" (dict "value" $value "lines" true) }}
{{- end -}}
{{- end -}}
{{- range $key := $tables -}}
{{- $path := append $.path (include "lorrery.tomlKey" $key) }}

[{{ join "." $path }}]
{{- include "lorrery.toml" (dict "table" (get $.table $key) "path" $path) -}}
{{- end -}}
{{- end -}}

{{- define "lorrery.tomlKey" -}}
{{- regexMatch "^[A-Za-z0-9_-]+$" . | ternary . (toRawJson .) -}}
{{- end -}}

{{/* (value, lines): a value in one line, or a list of tables with a line for each. JSON's scalars are TOML's. */}}
{{- define "lorrery.tomlValue" -}}
{{- if kindIs "map" .value -}}
{{- $pairs := list -}}
{{- range $key := keys .value | sortAlpha -}}
{{- $value := get $.value $key -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $pairs = append $pairs (printf "%s = %s" (include "lorrery.tomlKey" $key) (include "lorrery.tomlValue" (dict "value" $value))) -}}
{{- end -}}
{{- end -}}
{{- empty $pairs | ternary "{}" (printf "{ %s }" (join ", " $pairs)) -}}
{{- else if kindIs "slice" .value -}}
{{- $values := list -}}
{{- range .value -}}{{- $values = append $values (include "lorrery.tomlValue" (dict "value" .)) -}}{{- end -}}
{{- if and .lines .value (kindIs "map" (first .value)) -}}
{{- printf "[\n  %s,\n]" (join ",\n  " $values) -}}
{{- else -}}
{{- printf "[%s]" (join ", " $values) -}}
{{- end -}}
{{- else -}}
{{- toRawJson .value -}}
{{- end -}}
{{- end -}}
