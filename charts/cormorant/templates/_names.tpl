{{- /* Names, labels and images; the only file that spells them. */ -}}

{{- define "cormorant.chartName" -}}
{{ .Values.nameOverride | default "cormorant" }}
{{- end -}}

{{- define "cormorant.name" -}}
{{- $name := include "cormorant.chartName" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name }}
{{- else }}{{ .Release.Name }}-{{ $name }}{{ end -}}
{{- end -}}

{{- /* Of objects that belong to no namespace: two releases of one name may live in two namespaces. */ -}}
{{- define "cormorant.clusterName" -}}
{{ .Release.Namespace }}-{{ include "cormorant.name" . }}
{{- end -}}

{{- define "cormorant.selector" -}}
app.kubernetes.io/name: {{ include "cormorant.chartName" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "cormorant.labels" -}}
{{ include "cormorant.selector" . }}
app.kubernetes.io/part-of: cormorant
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "cormorant.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "cormorant.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end -}}

{{- define "cormorant.keySecret" -}}
{{ .Values.key.existingSecret | default (printf "%s-key" (include "cormorant.name" .)) }}
{{- end -}}

{{- /* (dict "image" IMAGE "context" .): a digest is stronger than a tag. */ -}}
{{- define "cormorant.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ .image.tag | default .context.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- /* Of workers with a device; empty where it is the image of all other pods. */ -}}
{{- define "cormorant.cudaImage" -}}
{{- $cuda := .Values.jobs.cudaImage }}{{ $all := .Values.jobs.image }}
{{- $repository := $cuda.repository | default (trimSuffix "-cpu" $all.repository) }}
{{- if or (ne $repository $all.repository) $cuda.tag $cuda.digest }}
{{- $image := dict "repository" $repository "tag" ($cuda.tag | default $all.tag) "digest" $cuda.digest }}
{{- include "cormorant.image" (dict "image" $image "context" .) }}
{{- end -}}
{{- end -}}

{{- /* Not empty where pods run as one fixed user. */ -}}
{{- define "cormorant.hasFixedUser" -}}
{{- $isOpenShift := .Capabilities.APIVersions.Has "security.openshift.io/v1" -}}
{{- if or (eq .Values.fixedUser "always") (and (eq .Values.fixedUser "auto") (not $isOpenShift)) }}true{{ end -}}
{{- end -}}

{{- define "cormorant.podSecurity" -}}
runAsNonRoot: true
{{- if include "cormorant.hasFixedUser" . }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "cormorant.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
