{{/*
A pod of one container. It takes a dict:

  root        the chart's context
  component   router, scheduler, worker, loadgen, web: which of the values is meant, and the label
  role        of the certificate that it shows: router, scheduler, worker, client
  args        of the image's `python -m`
  env         more environment, a list
  ports       name -> number
  probe       the number of the port that answers health checks by gRPC; unset: it has no gRPC server
  service     the gRPC service that readiness asks for; unset: the server as a whole
  http        the number of the port that answers readiness by HTTP, where `probe` is unset
  grace       seconds from SIGTERM, or the hook before it, to SIGKILL
  volumes, mounts, labels, own   more of these; own: values of one group that win over the component's
*/}}
{{- define "lorrery.pod" -}}
{{- $root := .root -}}
{{- $values := merge (deepCopy (.own | default dict)) (get .root.Values .component) -}}
{{- $tls := .root.Values.tls -}}
{{- $selector := include "lorrery.componentSelector" (dict "root" .root "component" .component) | fromYaml -}}
{{- $labels := merge $selector (.labels | default dict) -}}
{{- $token := empty .probe | not | ternary .root.Values.auth.clusterTokenSecret "" -}}
metadata:
  labels:
    {{- include "lorrery.andGiven" (dict "own" $labels "given" $values.podLabels "value" (printf "%s.podLabels" .component)) | nindent 4 }}
  annotations:
    {{- include "lorrery.andGiven" (dict "own" (dict "checksum/settings" (include "lorrery.checksum" .root))
          "given" $values.podAnnotations "value" (printf "%s.podAnnotations" .component)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "lorrery.serviceAccount" .root | quote }}
  automountServiceAccountToken: false
  # Variables such as LORRERY_ROUTER_SERVICE_HOST, which Kubernetes would set, are no settings, and refused.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace | default 30 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if has .component (list "router" "scheduler") }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "lorrery.componentSelector" (dict "root" .root "component" .component) | nindent 10 }}
  {{- else if eq .component "loadgen" }}
  restartPolicy: Never
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "lorrery.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
      env:
        - {name: LORRERY_CONFIG, value: /etc/lorrery/config/cluster.toml}
        {{- with .env }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- if $token }}
        - {name: LORRERY_CLUSTER_TOKEN, value: /etc/lorrery/token/token}
        {{- end }}
        {{- if $tls.enabled }}
        {{- if .probe }}
        - {name: LORRERY_SERVER_TLS__CERT, value: /etc/lorrery/tls/tls.crt}
        - {name: LORRERY_SERVER_TLS__KEY, value: /etc/lorrery/tls/tls.key}
        {{- if or (ne .component "router") $tls.clientCertificates }}
        - {name: LORRERY_SERVER_TLS__CA, value: /etc/lorrery/tls/ca.crt}
        {{- end }}
        {{- end }}
        - {name: LORRERY_CLIENT_TLS__CERT, value: /etc/lorrery/tls/tls.crt}
        - {name: LORRERY_CLIENT_TLS__KEY, value: /etc/lorrery/tls/tls.key}
        - {name: LORRERY_CLIENT_TLS__CA, value: /etc/lorrery/tls/ca.crt}
        {{- end }}
        {{- range .root.Values.extraEnv }}
        {{- $given := hasKey . "value" | ternary (dict "value" (include "lorrery.text" .value)) dict }}
        - {{ merge $given . | toYaml | nindent 10 | trim }}
        {{- end }}
      {{- with .ports }}
      ports:
        {{- range $name, $number := . }}
        - {name: {{ $name }}, containerPort: {{ $number }}}
        {{- end }}
      {{- end }}
      {{- if .probe }}
      # The process is there after a second of CPU, which takes long on a busy node. Until it is ready may take longer
      # still: a worker loads its weights, and dials until there is a scheduler.
      startupProbe:
        {{- include "lorrery.probe" (dict "root" .root "port" .probe "service" "liveness") | nindent 8 }}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 60
      readinessProbe:
        {{- include "lorrery.probe" (dict "root" .root "port" .probe "service" .service) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        {{- include "lorrery.probe" (dict "root" .root "port" .probe "service" "liveness") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- else if .http }}
      readinessProbe:
        httpGet: {path: /, port: {{ .http }}}
        periodSeconds: 10
        timeoutSeconds: 3
      {{- end }}
      {{- if and (eq .component "router") .root.Values.router.preStopSeconds }}
      lifecycle:
        # New connections come until every node has heard that this pod ends: they are served until then.
        preStop:
          exec: {command: [sleep, {{ .root.Values.router.preStopSeconds | quote }}]}
      {{- end }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: config, mountPath: /etc/lorrery/config, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $tls.enabled }}
        - {name: tls, mountPath: /etc/lorrery/tls, readOnly: true}
        {{- end }}
        {{- if $token }}
        - {{ include "lorrery.secretMount" (dict "name" "token") }}
        {{- end }}
        {{- with .mounts }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- with .root.Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: config
      configMap: {name: {{ include "lorrery.fullname" .root | quote }}}
    - name: tmp
      emptyDir: {medium: Memory, sizeLimit: 16Mi}
    {{- if $tls.enabled }}
    - name: tls
      secret:
        secretName: {{ get $tls.secrets .role | required (printf "tls.secrets.%s: the name of a Secret with tls.crt, tls.key and ca.crt, since tls.enabled is true" .role) | quote }}
        defaultMode: 0440
    {{- end }}
    {{- if $token }}
    - {{ include "lorrery.secretVolume" (dict "name" "token" "secret" $token "key" "token") | nindent 6 | trim }}
    {{- end }}
    {{- with .volumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with .root.Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* (root, port, service): the kubelet asks by gRPC, or, since it speaks no TLS, the program in the image does. */}}
{{- define "lorrery.probe" -}}
{{- if .root.Values.tls.enabled -}}
exec:
  command:
    - python
    - -I
    - -S
    - /opt/healthcheck.py
    - --cert
    - /etc/lorrery/tls/tls.crt
    - --key
    - /etc/lorrery/tls/tls.key
    - 127.0.0.1:{{ .port }}
    {{- with .service }}
    - {{ . }}
    {{- end }}
{{- else -}}
grpc:
  port: {{ .port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* A Secret's file as a volume, and where it is mounted: (name, secret, key). */}}
{{- define "lorrery.secretVolume" -}}
name: {{ .name }}
secret:
  secretName: {{ .secret | quote }}
  defaultMode: 0440
  items: [{key: {{ .key }}, path: {{ .key }}}]
{{- end -}}

{{- define "lorrery.secretMount" -}}
{name: {{ .name }}, mountPath: /etc/lorrery/{{ .name }}, readOnly: true}
{{- end -}}
