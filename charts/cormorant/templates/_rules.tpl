{{- /* What the operator may do in a namespace with jobs: what it asks for, and nothing else. A test compares. */ -}}
{{- define "cormorant.rules" -}}
- apiGroups: [cormorant.dev]
  resources: [collectorjobs]
  verbs: [list, watch, delete]
- apiGroups: [cormorant.dev]
  resources: [collectorjobs/status]
  verbs: [patch]
# Where OwnerReferencesPermissionEnforcement is on, it is asked for by every object that names a job as its owner.
- apiGroups: [cormorant.dev]
  resources: [collectorjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
# Where the API server serves PodGroups.
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
{{- if .Values.jobs.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch]
{{- end }}
{{- if .Values.jobs.tls.certManager }}
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, create, patch]
{{- end }}
{{- if .Values.jobs.kueue }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
# It reads and deletes none: tokens are derived from its key, and a ConfigMap owns each Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if not .Values.watchNamespaces }}
# Whether a node is lost that a head is expelled from. Nodes are in no namespace: without this, the grace is waited out.
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- end }}
{{- end -}}
