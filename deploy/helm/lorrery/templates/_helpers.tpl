{{/* Names and labels. */}}

{{- define "lorrery.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lorrery.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{/* All schedulers, by the name in DNS that their headless Service has. */}}
{{- define "lorrery.schedulers" -}}
{{ printf "dns:///%s-scheduler.%s.svc.%s:50052" (include "lorrery.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end -}}
