{{/* Names and labels. */}}

{{- define "lorrery.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- $name = $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s-router would be a Service's name; those begin with a letter, and have a-z, 0-9 and - only: set fullnameOverride, or name the release otherwise" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "lorrery.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* (root, component): what selects the pods of a component. */}}
{{- define "lorrery.componentSelector" -}}
{{ include "lorrery.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "lorrery.labels" -}}
{{ include "lorrery.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* (root, component): labels of an object that belongs to a component. */}}
{{- define "lorrery.componentLabels" -}}
{{ include "lorrery.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "lorrery.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "lorrery.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "lorrery.fullname" .) "default") -}}
{{- end -}}

{{/* A value as text: what an environment variable or an argument has to be. A number in a file of values is a float. */}}
{{- define "lorrery.text" -}}
{{- kindIs "string" . | ternary . (toRawJson .) -}}
{{- end -}}

{{/* (own, given, value): the chart's own labels or annotations, and those of a value, which may not be the same. */}}
{{- define "lorrery.andGiven" -}}
{{- $own := .own -}}
{{- $value := .value -}}
{{- range $key := keys (.given | default dict) | sortAlpha -}}
{{- if hasKey $own $key -}}
{{- fail (printf "%s: %s is set by the chart; leave it out, or choose another key" $value $key) -}}
{{- end -}}
{{- end -}}
{{- merge $own (.given | default dict) | toYaml -}}
{{- end -}}

{{/* All schedulers, by the name in DNS that their headless Service has. */}}
{{- define "lorrery.schedulers" -}}
{{ printf "dns:///%s-scheduler.%s.svc.%s:50052" (include "lorrery.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end -}}
