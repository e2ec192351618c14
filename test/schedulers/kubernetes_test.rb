# frozen_string_literal: true

require "json"
require "open3"
require "yaml"
require_relative "scheduler_case"

# The manifests of examples/kubernetes: checked against the schemas, and their pods' commands started here with the
# environment that the training operator gives them.
class KubernetesTest < SchedulerCase
  FOLDER = "#{ROOT}/examples/kubernetes"
  SCHEMAS = {"PyTorchJob" => "pytorchjob", "Job" => "job", "Service" => "service"}.freeze
  PYTHON = "/usr/bin/python3"

  # The operator's names for the port, and its number where the container names none.
  PORT_NAME = "pytorchjob-port"
  PORT = 23_456

  def documents(name)
    YAML.load_stream(File.read("#{FOLDER}/#{name}.yaml")).map { |document| JSON.parse(JSON.generate(document)) }
  end

  def schema(document)
    JSON.parse(File.read("#{__dir__}/schemas/#{SCHEMAS.fetch(document.fetch("kind"))}.json"))
  end

  # @return [Array<Array<String>>] the errors of each document
  def errors(*documents)
    skip "Debian's python3-jsonschema is not installed (rake test:schedulers installs it)" unless
      system(PYTHON, "-c", "import jsonschema", out: File::NULL, err: File::NULL)
    out, err, status = Open3.capture3(PYTHON, "#{__dir__}/validate.py",
      stdin_data: JSON.generate(documents.map { |document| [schema(document), document] }))
    assert status.success?, err
    JSON.parse(out)
  end

  def test_the_manifests_are_as_the_schemas_want
    files = Dir.children(FOLDER).grep(/\.yaml\z/)
    assert_equal %w[job.yaml pytorchjob-elastic.yaml pytorchjob.yaml], files.sort
    all = files.flat_map { |file| documents(File.basename(file, ".yaml")) }
    errors(*all).zip(all) { |found, document| assert_empty found, document["kind"] }
  end

  def test_the_schemas_find_mistakes
    job = documents("pytorchjob").first
    wrong = [
      [%w[spec nprocPerNode], 2, /2 is not of type 'string'/],
      [%w[spec pytorchReplicaSpecs Worker replicas], "3", /'3' is not of type 'integer'/],
      [%w[spec pytorchReplicaSpecs Worker restart], "Never", /'restart' was unexpected/],
      [%w[spec elasticPolicy], {"min" => 1}, /'min' was unexpected/],
      [%w[spec pytorchReplicaSpecs Worker template spec], {}, /'containers' is a required property/]
    ]
    changed = wrong.map do |path, value, _pattern|
      JSON.parse(JSON.generate(job)).tap { |copy| path[..-2].inject(copy) { |at, key| at[key] }[path.last] = value }
    end
    errors(*changed).zip(wrong) { |found, (_, _, pattern)| assert_match pattern, found.join("\n") }
  end

  # What the operator itself asks for, in no schema.
  def test_what_the_operator_asks_for
    %w[pytorchjob pytorchjob-elastic].each do |name|
      replicas = documents(name).first["spec"]["pytorchReplicaSpecs"]
      assert_empty replicas.keys - %w[Master Worker]
      assert_includes [nil, 1], replicas.dig("Master", "replicas")
      replicas.each_value { |each| assert_equal %w[pytorch], containers(each).map { |container| container["name"] } }
    end
  end

  def containers(replica)
    replica["template"]["spec"]["containers"]
  end

  # As pkg/controller.v1/pytorch/envvar.go, master.go and elastic.go of v1.9 have it.
  def operator_environment(job, type, index)
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    total = replicas.values.sum { |each| each["replicas"] }
    env = {"PYTHONUNBUFFERED" => "1"}
    env.merge!(master_environment(job, type, index, total)) if replicas["Master"]
    env["PET_NPROC_PER_NODE"] = spec["nprocPerNode"] if spec["nprocPerNode"]
    spec["elasticPolicy"] ? env.merge!(elastic_environment(job)) : env["PET_NNODES"] = total.to_s
    env
  end

  def master_environment(job, type, index, total)
    rank = (type == "Worker") ? index + 1 : index
    port = port_of(job, "Master").to_s
    host = "#{job["metadata"]["name"]}-master-0"
    {"MASTER_PORT" => port, "PET_MASTER_PORT" => port, "MASTER_ADDR" => host, "PET_MASTER_ADDR" => host,
     "WORLD_SIZE" => (total * Integer(job["spec"]["nprocPerNode"] || 1)).to_s, "RANK" => rank.to_s, "PET_NODE_RANK" => rank.to_s}
  end

  def elastic_environment(job)
    policy = job["spec"]["elasticPolicy"]
    host = policy["rdzvHost"] || "#{job["metadata"]["name"]}-worker-0"
    conf = policy["rdzvConf"]&.map { |each| "#{each["key"]}=#{each["value"]}" }&.join(",")
    nodes = policy["minReplicas"] ? "#{policy["minReplicas"]}:#{policy["maxReplicas"]}" : job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    {"PET_RDZV_ENDPOINT" => "#{host}:#{policy["rdzvPort"] || port_of(job, "Worker")}", "PET_RDZV_BACKEND" => policy["rdzvBackend"] || "c10d",
     "PET_NNODES" => nodes.to_s, "PET_MAX_RESTARTS" => policy["maxRestarts"]&.to_s, "PET_NPROC_PER_NODE" => policy["nProcPerNode"]&.to_s,
     "PET_RDZV_ID" => policy["rdzvId"], "PET_RDZV_CONF" => conf, "PET_STANDALONE" => (policy["standalone"] ? "" : nil)}.compact
  end

  def port_of(job, type)
    ports = containers(job["spec"]["pytorchReplicaSpecs"][type]).first["ports"] || []
    ports.find { |port| port["name"] == PORT_NAME }&.fetch("containerPort") || PORT
  end

  # The pods' names are this machine's, and their port is free here.
  def here(env, port)
    env.transform_values { |value| value.gsub(/train(-elastic)?-(master|worker)-\d+/, "127.0.0.1").gsub(PORT.to_s, port.to_s) }
  end

  # Starts the command of a pod's container with another script.
  def start_pod(container, env, code)
    command = container["command"]
    assert_equal %w[bundle exec torchrun examples/slurm/train.rb], command.first(4)
    start(*ruby(code), env: env)
  end

  # @return [Array<LaunchCase::Run>]
  def start_replicas(job, code, port: free_port)
    job["spec"]["pytorchReplicaSpecs"].flat_map do |type, replica|
      replica["replicas"].times.map do |index|
        start_pod(containers(replica).first, here(operator_environment(job, type, index), port), code)
      end
    end
  end

  def all_joined(runs)
    runs.map { |run| run.finish }.flat_map { |result| joined(result) }.sort_by { |words| words[1].to_i }
  end

  # Half as many pods as the manifest has: this is one machine.
  def test_a_job_of_the_operator
    job = documents("pytorchjob").first
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 1
    lines = all_joined(start_replicas(job, JOIN))
    assert_equal 4.times.map { |rank| %W[10 #{rank} 4 #{rank % 2} 2] }, lines.map { |line| line.first(5) }
  end

  # One process a pod needs no torchrun.
  def test_a_job_of_the_operator_without_torchrun
    job = documents("pytorchjob").first
    job["spec"].delete("nprocPerNode")
    port = free_port
    runs = [["Master", 0], ["Worker", 0], ["Worker", 1]].map do |type, index|
      job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2
      start(*ruby(JOIN), command: [RbConfig.ruby], env: here(operator_environment(job, type, index), port))
    end
    lines = all_joined(runs)
    assert_equal 3.times.map { |rank| %W[6 #{rank} 3] }, lines.map { |line| line.first(3) }
  end

  # What the operator's successor, the trainer, gives the pods of a TrainJob: as its plugin torch of v2 has it.
  def test_a_job_of_the_trainer
    shared = {"PET_NNODES" => "2", "PET_NPROC_PER_NODE" => "2", "PET_MASTER_ADDR" => "127.0.0.1", "PET_MASTER_PORT" => free_port.to_s}
    lines = all_joined(2.times.map { |index| start(*ruby(JOIN), env: shared.merge("PET_NODE_RANK" => index.to_s)) })
    assert_equal 4.times.map { |rank| %W[10 #{rank} 4 #{rank % 2} 2] }, lines.map { |line| line.first(5) }
  end

  def test_an_elastic_job_of_the_operator
    job = documents("pytorchjob-elastic").first
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2
    # The manifest's own patience is for pods that are started one after the other.
    job["spec"]["elasticPolicy"]["rdzvConf"].find { |each| each["key"] == "last_call_timeout" }["value"] = "2"
    environment = operator_environment(job, "Worker", 0)
    assert_equal "1:3", environment["PET_NNODES"]
    assert_equal "join_timeout=900,last_call_timeout=2", environment["PET_RDZV_CONF"]
    lines = all_joined(start_replicas(job, JOIN))
    assert_equal 4.times.map { |rank| %W[10 #{rank} 4 #{rank % 2} 2] }, lines.map { |line| line.first(5) }
  end

  # The operator sets that variable to nothing, which PyTorch's own torchrun takes for no number.
  def test_a_standalone_job_of_the_operator
    job = documents("pytorchjob-elastic").first
    job["spec"]["elasticPolicy"] = {"standalone" => true}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 1
    assert_equal "", operator_environment(job, "Worker", 0)["PET_STANDALONE"]
    lines = all_joined(start_replicas(job, JOIN))
    assert_equal [%w[3 0 2 0 2], %w[3 1 2 1 2]], lines.map { |line| line.first(5) }
  end

  # Without any operator: what the manifest itself says, and the index that Kubernetes gives each pod.
  def test_an_indexed_job
    job = documents("job").last
    container = containers(job["spec"]).first
    port = free_port
    runs = 3.times.map do |index|
      env = container["env"].to_h do |each|
        [each["name"], each["value"] || (index.to_s if each["valueFrom"]["fieldRef"]["fieldPath"].include?("job-completion-index"))]
      end
      assert_equal job["spec"]["completions"].to_s, env["PET_NNODES"]
      # The first pod's name is a port of this host.
      start_pod(container, env.merge("PET_NNODES" => "3", "PET_RDZV_ENDPOINT" => "127.0.0.1:#{port}"), JOIN)
    end
    lines = all_joined(runs)
    assert_equal 6.times.map { |rank| %W[21 #{rank} 6 #{rank % 2} 2] }, lines.map { |line| line.first(5) }
  end

  # Pods find each other by the Service's names.
  def test_the_service_names_the_jobs_pods
    service, job = documents("job")
    name = job["metadata"]["name"]
    assert_equal({"batch.kubernetes.io/job-name" => name}, service["spec"]["selector"])
    assert_equal service["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    endpoint = containers(job["spec"]).first["env"].find { |each| each["name"] == "PET_RDZV_ENDPOINT" }["value"]
    assert_equal "#{name}-0.#{service["metadata"]["name"]}:29400", endpoint
  end
end
